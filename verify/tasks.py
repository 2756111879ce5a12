"""What several processes of one judgement say to each other: plain data, one JSON line each. No torch.

The process above hands out tasks; a worker answers with `Event`s and with the replies here.
"""

from __future__ import annotations

import msgspec

from bridge.verify.request import Declared, Event, Lost


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """Evidence that a judged case left for diagnosis; what decides whether more of its kind is kept."""

    number: int
    dtype: str
    family: str
    failed: bool


class Drawn(msgspec.Struct, frozen=True, kw_only=True):
    """A planned case, as much as it takes to share the cases out."""

    name: str
    group: str  #: cases of one group run the same compiled kernels
    cost: float  #: estimated, in units of a small case


class Observe(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Task: run the target on this one of the observed cases, for its tile sizes."""

    place: int


class Plan(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Task: draw every case, with edges at these tile sizes."""

    tiles: tuple[int, ...]


class Take(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Task: judge these cases, numbered from 1."""

    numbers: tuple[int, ...]
    digests: tuple[tuple[str, ...], ...]  #: of their inputs, as declared
    kept: tuple[Kept, ...]  #: evidence that is there already


class Conclude(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Task: put the verdict together from what all workers left."""

    declared: Declared
    done: tuple[int, ...]
    lost: tuple[Lost, ...]
    last: int | None


Task = Observe | Plan | Take | Conclude


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply: kernel and capture are loaded."""

    observe: int  #: cases to run for tile sizes; 0: what is judged does not depend on any


class Observed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply: tile sizes seen."""

    tiles: tuple[int, ...]


class Planned(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply: every case of the judgement, in order."""

    cases: tuple[Drawn, ...]


class Judged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply: one case is judged and what was found lies in the common folder."""

    number: int
    kept: Kept | None


class Free(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply: the cases that were taken are judged."""


class Alone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply: only a single process can judge this kernel."""

    reason: str


Reply = Loaded | Observed | Planned | Judged | Free | Alone
Message = Event | Reply
