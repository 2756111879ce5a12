"""Several steps of one run in one capture folder: digests of each, tensors of one."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from bridge.capture.select import Matcher, Selection
from bridge.capture.stepper import StepSession
from bridge.capture.tracer import Tracer
from bridge.capture.writer import RankReport, RankWriter


class SeriesTracer(Tracer):
    """A tracer that is entered once for every step of a window.

    tracer = SeriesTracer(model, out="capture/", step=90, tensors_at=100)
    for step in range(90, 101):
        tracer.prepare(step)
        with tracer:
            train_step()
    tracer.finish()
    """

    def __init__(self, *args: Any, tensors_at: int, selection: Selection, **more: Any) -> None:
        """As `Tracer`; only step `tensors_at` stores what `selection` names."""
        super().__init__(*args, selection=selection, **more)
        self._tensors_at = tensors_at
        self._writer: RankWriter | None = None
        self._contents = 0
        self._emitted = 0
        self._done: list[int] = []

    def prepare(self, step: int) -> None:
        """Say which step the next `with` is."""
        self.step = step

    def __enter__(self) -> SeriesTracer:
        whole, self._selection = self._selection, self._now()
        try:
            if self._writer is None:
                super().__enter__()
                assert self._session is not None, "the base class has begun a step"
                self._writer = self._session._writer
            else:
                self._next_session()
        finally:
            self._selection = whole
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        assert self._session is not None, "a step ended that never began"
        self._done.append(self.step)
        at = self._tensors_at if self._tensors_at in self._done else self.step
        self._manifest = replace(self._manifest, step=at, steps=tuple(self._done))
        self._session.stop(error)
        recorder = self._session.recorder
        self._contents = recorder.observer.storages._contents
        self._emitted += len(recorder.emitted)
        if error is not None:
            self.finish()

    def _now(self) -> Selection:
        return self._selection if self.step == self._tensors_at else replace(self._selection, which="none")

    def _next_session(self) -> None:
        assert self._writer is not None, "the first step has made the writer"
        self._session = StepSession(
            self._writer,
            Matcher(self._selection, rank=self.rank),
            parts=self._parts,
            step=self.step,
            rank=self.rank,
            max_tensor_bytes=self._selection.max_tensor_bytes,
        )
        # Contents are numbered through the whole folder.
        self._session.recorder.observer.storages._contents = self._contents
        self._session.start()

    def _close(self, session: StepSession) -> RankReport:
        assert self._writer is not None, "a closed capture has a writer"
        return self._writer.close(calls=self._emitted)
