"""Which steps of a run to look at, and which of them keeps its tensors.

    100        that step, digests and selected tensors
    90:110     every step of the window, digests only; tensors at the last one
    90:110@100 the same, tensors at step 100

With a trigger (`--on nonfinite`, `--on loss-jump`) every step of the window, or of the run, is
recorded and thrown away again until the trigger fires. Imports no torch.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from bridge.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Steps `first` to `last`, both included; `last` None has no end."""

    first: int
    last: int | None
    tensors_at: int | None  #: the step whose tensors are kept; None: every recorded step keeps its own

    def __contains__(self, step: int) -> bool:
        return self.first <= step and (self.last is None or step <= self.last)

    @property
    def single(self) -> bool:
        """Whether it holds exactly one step."""
        return self.first == self.last

    def __str__(self) -> str:
        if self.single:
            return f"step {self.first}"
        return f"steps {self.first}:{'' if self.last is None else self.last}"


def parse_window(text: str | int, *, triggered: bool = False, where: str = "--step") -> Window:
    """Read "100", "90:110" or "90:110@100".

    Args:
        text: What was given.
        triggered: A trigger decides within the window, so "90:" (no end) is allowed.
        where: Where it was given, for messages.

    Raises:
        UsageError: not of that form, empty, or with the tensors' step outside.
    """
    match = re.fullmatch(r"(\d+)(?:(:)(\d+)?)?(?:@(\d+))?", str(text).strip())
    if match is None or int(match[1]) < 1:
        raise UsageError(
            f'{where} takes a step from 1 on ("100") or a window ("90:110", "90:110@100"), got {text!r}'
        )
    first = int(match[1])
    last = int(match[3]) if match[3] else (None if match[2] else first)
    if last is None and not triggered:
        raise UsageError(f"{where} {text} has no end; an open window needs a trigger (--on nonfinite)")
    if last is not None and last < first:
        raise UsageError(f"{where} {text} ends before it starts; write {last}:{first}")
    at = int(match[4]) if match[4] else last
    if triggered:
        return Window(first=first, last=last, tensors_at=None)
    window = Window(first=first, last=last, tensors_at=at)
    if at is not None and at not in window:
        raise UsageError(f"{where} {text}: step {at} is outside the window")
    return window


@dataclass(slots=True)
class NonfiniteTrigger:
    """Fires when the step's loss or gradient norm is NaN or infinite."""

    name: str = "nonfinite"

    def fires(self, loss: float | None, grad_norm: float | None) -> str | None:
        """The reason, in words, or None."""
        for what, value in (("loss", loss), ("gradient norm", grad_norm)):
            if value is not None and not math.isfinite(value):
                return f"{what} is {value}"
        return None


@dataclass(slots=True)
class LossJumpTrigger:
    """Fires when the loss leaves the recent ones upwards.

    The bound is median + max(`factor` x median absolute deviation, `least` x |median|) over the last
    `window` losses, and nothing fires before `warmup` of them are known.
    """

    factor: float = 8.0
    least: float = 0.1
    window: int = 32
    warmup: int = 8
    name: str = "loss-jump"
    _recent: deque[float] = field(default_factory=deque)

    def fires(self, loss: float | None, grad_norm: float | None) -> str | None:
        """The reason, in words, or None. A non-finite loss fires too."""
        if loss is None:
            return None
        if not math.isfinite(loss):
            return f"loss is {loss}"
        recent = sorted(self._recent)
        if len(recent) >= self.warmup:
            median = recent[len(recent) // 2]
            deviation = sorted(abs(value - median) for value in recent)[len(recent) // 2]
            bound = median + max(self.factor * deviation, self.least * abs(median))
            if loss > bound:
                return (
                    f"loss {loss:.6g} is above {bound:.6g} (median of the last {len(recent)}: {median:.6g})"
                )
        self._recent.append(loss)
        if len(self._recent) > self.window:
            self._recent.popleft()
        return None


Trigger = NonfiniteTrigger | LossJumpTrigger

TRIGGERS: dict[str, Callable[[], Trigger]] = {"nonfinite": NonfiniteTrigger, "loss-jump": LossJumpTrigger}
