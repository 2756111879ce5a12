"""What is to be judged and what is said while it is: plain data that crosses the process border. No torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from bridge.errors import UsageError
from bridge.verify.verdict import Constants, Provenance, Verdict

#: Phase during which the target first runs, to show its tile sizes.
PLANNING = "planning"
#: Phase in which every case is drawn.
DRAWING = "drawing inputs"
#: Phase in which what all cases showed is put together: power, diagnosis.
WEIGHING = "weighing the evidence"


class ConstantChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Gate constants that the user declares for this run; None leaves the spec's own in force."""

    fudge_factor: float | None = None
    project_atol: float | None = None
    max_reference_relative_error: float | None = None

    def over(self, declared: Constants) -> Constants:
        """These constants where given, else the spec's."""
        given = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}
        return msgspec.structs.replace(declared, **given)

    def check(self) -> None:
        """Raise UsageError for a constant that could not judge anything."""
        for name, least in (
            ("fudge_factor", 1.0),
            ("project_atol", 0.0),
            ("max_reference_relative_error", 0.0),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value < float("inf"):
                raise UsageError(
                    f"--{name.replace('_', '-')} must be a finite number >= {least:g}, got {value}"
                )


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One judgement, as asked for."""

    op: str | None = None  #: spec name, or a glob over the capture's calls
    kernel: str | None = None  #: FILE[:SPEC]
    reference: str | None = None  #: dotted name of an eager function, with `target_fn` instead of a spec
    target_fn: str | None = None
    capture: str | None = None
    call: str | None = None  #: judge this captured call only: its `call_id`
    partial: bool = False  #: judge a capture whose writer died
    target: Literal["kernel", "recorded"] = "kernel"
    sweep: bool = True
    quick: bool = False  #: of drawn inputs the declared shapes only
    max_calls: int = 4
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    seed: int = 0
    constants: ConstantChoice = ConstantChoice()
    command: tuple[str, ...] = ()

    def check(self, *, named: bool = True) -> None:
        """Raise UsageError when the parts of the request exclude each other; named: it must name a kernel."""
        self.constants.check()
        if (self.reference is None) != (self.target_fn is None):
            raise UsageError(
                "--reference and --target-fn go together: the eager twin and what is judged against it"
            )
        if self.reference is not None and self.kernel is not None:
            raise UsageError("--kernel brings its own reference; leave out --reference and --target-fn")
        if named and self.op is None and self.kernel is None and self.reference is None:
            raise UsageError("nothing to judge: name a kernel with --op NAME or --kernel FILE")
        if self.target == "recorded" and self.capture is None:
            raise UsageError("--target recorded judges what a run recorded: name the capture with --from DIR")
        if not self.sweep and self.capture is None:
            raise UsageError("--no-sweep leaves the captured calls alone: name the capture with --from DIR")
        if self.capture is not None and not Path(self.capture).exists():
            raise UsageError(
                f"capture {self.capture} does not exist; `bridge capture --out {self.capture}` makes one"
            )


class Declared(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Everything that must be fixed before the target runs."""

    op: str
    constants: Constants
    provenance: Provenance
    cases: tuple[str, ...]
    input_digests: dict[str, tuple[str, ...]]  #: case -> one digest per input


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The target is about to run on this case."""

    case: str
    number: int  #: from 1
    total: int


class Phase(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Work outside the judging of any case: loading, power, diagnosis."""

    name: str
    case: str = ""  #: while planning: what the target is about to run on
    number: int = 0  #: of that case


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The end, with the verdict."""

    verdict: Verdict


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A BridgeError: class name and message."""

    error: str
    message: str


class Unusable(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The case left the process alive but unusable, as an illegal memory access on a GPU does."""

    reason: str


class Broke(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A fault of ours: the traceback."""

    text: str


Event = Declared | Started | Phase | Finished | Refused | Unusable | Broke
Emit = Callable[[Event], None]


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """A case whose process died or hung; reason in words."""

    case: str
    number: int
    reason: str
    hung: bool = False


class Resume(msgspec.Struct, frozen=True, kw_only=True):
    """What earlier processes of the same judgement found out the hard way."""

    lost: tuple[Lost, ...] = ()
    last: int | None = None  #: number of the last case to judge; None: all


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What makes a child one of several that judge together."""

    folder: str  #: common to all: what was found about each case; made by whoever needs it first


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a child process is given on stdin."""

    request: Request
    resume: Resume
    share: Share | None = None  #: None: it judges everything by itself
