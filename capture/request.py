"""What a capture is asked for and what it answers: plain records. Imports no torch."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import msgspec

from bridge.capture.select import Selection
from bridge.capture.window import Window

#: Receives messages for the user, one line each.
Say = Callable[[str], None]
#: Told each step that starts, and the last one wanted if that is known.
Progress = Callable[[int, int | None], None]


def size(count: int) -> str:
    """Bytes for a person: 1536 is "1.5 KiB"."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one capture that the command line and `train.toml` can say, merged."""

    window: Window
    selection: Selection  #: its patterns are filled in when the kernels' sites are known
    ops: tuple[str, ...]  #: kernel names and globs
    out: Path
    ops_of_config: bool = False  #: they are those of [capture], none were asked for
    force: bool = False
    budget_bytes: int | None = None
    trigger: str | None = None
    replace: dict[str, str] = {}  #: module class -> kernel in its place
    eager: bool = False  #: run compiled regions eagerly in recorded steps
    stop: bool = True
    note: str | None = None  #: told to the user once nothing is left to refuse


class CaptureResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a captured run left; usable as a path."""

    path: Path
    step: int  #: the step whose tensors were kept
    steps: tuple[int, ...]  #: every step with calls
    calls: int
    calls_with_tensors: int
    stored_bytes: int
    kernels: tuple[str, ...]  #: known kernels that occur in it
    metrics: dict[str, float | None] = {}
    dropped: int = 0
    dropped_because: str | None = None  #: the reason of most of them
    problems: tuple[str, ...] = ()
    problem_codes: dict[str, str] = {}  #: a problem -> its code, as in the manifest
    trigger: str | None = None  #: why a triggered capture was kept

    def __fspath__(self) -> str:
        return str(self.path)

    def as_dict(self) -> dict[str, object]:
        """For `bridge capture --json`."""
        plain = msgspec.structs.asdict(self)
        return {**plain, "path": str(self.path)}

    def describe(self) -> str:
        """A few lines for a person, the next command last."""
        metrics = "".join(
            f"  {name} {value:.6g}" for name, value in self.metrics.items() if value is not None
        )
        lines = [f"{self.path}/  step {self.step}{metrics}"]
        folder = shlex.quote(f"{self.path}/")  # as a shell takes it
        kept = f"{self.calls_with_tensors:,} with tensors, {size(self.stored_bytes)}"
        lines.append(f"  {self.calls:,} calls, {kept}")
        if self.trigger is not None:
            lines.append(f"  kept because {self.trigger}")
        if self.dropped:
            why = f" ({self.dropped_because})" if self.dropped_because else ""
            shown = shlex.quote(str(self.path))
            lines.append(f"  {self.dropped} tensors were dropped{why}; `bridge inspect {shown}` lists them")
        lines += [f"  problem: {problem}" for problem in self.problems]
        if self.kernels and self.calls_with_tensors:
            lines.append(f"next: bridge verify --op {self.kernels[0]} --from {folder}")
        elif 2 * self.calls_with_tensors > self.calls:
            lines.append(f"next: bridge scan --from {folder}")
        else:
            lines.append(f"next: bridge inspect {folder}")
        return "\n".join(lines)
