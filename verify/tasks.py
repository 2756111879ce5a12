"""What several processes of one judgement say to each other: plain data, one JSON line each. No torch.

The process above hands out tasks; a worker answers with `Event`s and with the replies here.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from bridge.verify.request import Declared, Event, Lost


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """Evidence that a judged case left for diagnosis; what decides whether more of its kind is kept."""

    number: int
    dtype: str
    family: str
    failed: bool


def has_room(own: Kept, before: Iterable[Kept]) -> bool:
    """Whether evidence is among the first of its kind: four that failed in a family, two that passed."""
    alike = sum(
        k.failed == own.failed and k.dtype == own.dtype and (k.family == own.family or not own.failed)
        for k in before
    )
    return alike < (4 if own.failed else 2)


#: Group of the captured calls.
CAPTURED = "captured"


class Drawn(msgspec.Struct, frozen=True, kw_only=True):
    """A planned case, as much as it takes to share the cases out."""

    name: str
    group: str  #: cases of one group run the same compiled kernels
    cost: float  #: estimated, in units of a small case


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A case that is known before all are planned."""

    case: str
    number: int  #: from 1, as when all are planned


class Observe(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Task: run the target on this one of the observed cases, for its tile sizes."""

    place: int


class Declare(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Task: declare what can be fixed before the target runs at all, and say which cases those are."""


class Plan(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Task: draw every case, with edges at these tile sizes."""

    tiles: tuple[int, ...]
    tell: bool  #: declare them, and say which they are


class Take(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Task: judge these cases, numbered from 1."""

    numbers: tuple[int, ...]
    digests: tuple[tuple[str, ...], ...]  #: of their inputs, as declared
    kept: tuple[Kept, ...]  #: evidence that is there already


class Try(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Task: put every `step`-th wrong variant from place `start` on in the target's place."""

    declared: Declared
    numbers: tuple[int, ...]  #: cases whose evidence to try them on
    tiles: tuple[int, ...]
    start: int
    step: int


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """One wrong variant, and whether the inputs revealed it."""

    place: int
    text: str
    seen: bool


class Conclude(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Task: put the verdict together from what all workers left."""

    declared: Declared
    done: tuple[int, ...]
    lost: tuple[Lost, ...]
    tried: tuple[Tried, ...] | None  #: None: no variant was tried yet


Task = Declare | Observe | Plan | Take | Try | Conclude


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply: torch is loaded."""

    forks: bool  #: workers are forked from this process; False: it is a worker itself


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply: the kernel is loaded, captured calls are bound and the declared shapes drawn."""

    observe: tuple[Place, ...]  #: cases to run for tile sizes; (): what is judged does not depend on any


class Observed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply: tile sizes seen."""

    tiles: tuple[int, ...]


class Known(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply: the cases that do not depend on tile sizes, with which every plan begins."""

    cases: tuple[Drawn, ...]


class Planned(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply: every case of the judgement, in order."""

    cases: tuple[Drawn, ...]


class Judged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply: one case is judged and what was found lies in the common folder."""

    number: int
    kept: Kept | None
    failed: bool = False  #: a tensor of it fails
    tiles: tuple[int, ...] = ()


class Shown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply: which variants were revealed."""

    tried: tuple[Tried, ...]


class Free(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply: the task is done."""


class Alone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply: only a single process can judge this kernel."""

    reason: str


Reply = Opened | Loaded | Observed | Known | Planned | Judged | Shown | Free | Alone
Message = Event | Reply
