"""Decides, step by step, whether a run is being recorded, and knows when it may stop.

The training loop (torchtitan's, or any script's) calls `run_step` around each optimizer step; nothing
is installed outside the steps that are wanted. How a step is recorded is the business of the
`open_step` function that the recorder is given (see `api`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from bridge.capture.window import Window
from bridge.errors import StepNotReachedError

T = TypeVar("T")


class Abandoned(BaseException):
    """Thrown into an open step when the run ends before the step does: what it holds is no step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a run knows about itself, for the manifest."""

    config: dict[str, Any] = field(default_factory=dict)
    config_path: str | None = None
    seed: int | None = None
    flags: dict[str, Any] = field(default_factory=dict)


#: Opens the recording of one step: (model parts, facts, step) -> context manager around the step.
OpenStep = Callable[[Sequence[Any], RunFacts, int], AbstractContextManager[Any]]
#: Called after each recorded step with (step, loss, gradient norm); True ends the run.
AfterStep = Callable[[int, float | None, float | None], bool]


class StepRecorder:
    """The recorder of one rank's run.

    Args:
        window: Steps to record.
        open_step: Records one step.
        after_step: Told each recorded step's metrics; True ends the run early.
        say: Where messages to the user go.
        progress: Told each step that starts, and the last one wanted if that is known.
        trigger: What `after_step` waits for, in words.
    """

    def __init__(
        self,
        window: Window,
        open_step: OpenStep,
        *,
        after_step: AfterStep | None = None,
        say: Callable[[str], None] | None = None,
        progress: Callable[[int, int | None], None] | None = None,
        trigger: str | None = None,
    ) -> None:
        self.window = window
        self.finished = False
        self.recorded: list[int] = []
        self.losses: dict[int, tuple[float | None, float | None]] = {}
        self.failure: Exception | None = None
        self._open_step = open_step
        self._after_step = after_step
        self._say = say
        self._progress = progress
        self._trigger = trigger
        self._parts: Sequence[Any] = ()
        self._facts = RunFacts()
        self._seen_first = False

    @property
    def last_step(self) -> int | None:
        """Last step that is wanted; None when the window has no end."""
        return self.window.last

    def say(self, text: str) -> None:
        """Tell the user something about the run."""
        if self._say is not None:
            self._say(text)

    def attach(self, parts: Sequence[Any], facts: RunFacts) -> None:
        """Take the model (its parts under pipeline parallelism) and the run's facts."""
        self._parts = parts
        self._facts = facts

    def begins(self, step: int) -> None:
        """Take note that `step` begins, recorded or not.

        Raises:
            StepNotReachedError: It is the run's first and lies past the window.
        """
        if not self._seen_first:
            self._seen_first = True
            self._refuse_late_start(step)
        if self._progress is not None and not self.finished:
            self._progress(step, self.window.last)

    def starts_at(self, step: int) -> bool:
        """Whether `step` is to be recorded."""
        return not self.finished and step in self.window

    def run_step(self, step: int, run: Callable[[], T]) -> T:
        """Run one optimizer step, recorded when it is wanted.

        Args:
            step: Global step number, resumed runs included.
            run: The step itself.

        Raises:
            StepNotReachedError: The run was resumed past the window.
        """
        self.begins(step)
        if not self.starts_at(step):
            return run()
        with self.open(step):
            return run()

    @contextmanager
    def open(self, step: int) -> Iterator[None]:
        """Record what happens inside as `step`.

        An exception of the step itself goes on to the caller, and `failure` keeps it: the step that
        was asked for is the one that fails, so what was recorded of it is what the user needs.
        """
        with self._open_step(self._parts, self._facts, step):
            try:
                yield
            except Exception as error:
                self.failure = error
                self.finished = True
                self.recorded.append(step)
                raise
        self.recorded.append(step)
        loss, grad_norm = self.losses.get(step, (None, None))
        stop = self._after_step(step, loss, grad_norm) if self._after_step is not None else False
        self.finished = stop or step == self.window.last

    def metrics(self, step: int, *, loss: float | None, grad_norm: float | None) -> None:
        """Take what the run itself logs about a step."""
        self.losses[step] = (loss, grad_norm)

    def wants_metrics(self, step: int) -> bool:
        """Whether the run should compute its metrics at this step even if it would not log them."""
        return step in self.window

    def not_reached(self, last: int) -> str:
        """Message for a run that ended before the window did."""
        if self._trigger is not None and self.recorded:
            first, end = self.recorded[0], self.recorded[-1]
            return f"the run ended at step {last}: {self._trigger} did not happen from step {first} to {end}"
        if self.recorded:
            first, end = self.recorded[0], self.recorded[-1]
            return f"the run ended at step {last}, within {self.window}; steps {first} to {end} were recorded"
        return (
            f"the run ended at step {last}, before {self.window}; nothing was captured there. "
            f"Ask for a step up to {last}, or give the run more steps or data"
        )

    def _refuse_late_start(self, step: int) -> None:
        if self.window.last is not None and step > self.window.last:
            raise StepNotReachedError(
                f"the run resumes at step {step}, past {self.window}; load an earlier checkpoint "
                f"(checkpoint.load_step) or ask for a step from {step} on"
            )
