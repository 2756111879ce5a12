"""How recorded steps become a capture folder: one step, a window, or the step that a trigger picks."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from bridge.capture.folder import MANIFEST, FolderClaim, disk_full, read_manifest
from bridge.capture.request import Request
from bridge.capture.select import Selection
from bridge.capture.series import SeriesTracer
from bridge.capture.steps import Abandoned, RunFacts, StepRecorder
from bridge.capture.tracer import Tracer
from bridge.capture.window import TRIGGERS


class OneStepKeeper:
    """Records the one step of the window into the folder.

    An older capture that `--force` gives up is replaced only when the new one is whole.
    """

    def __init__(self, request: Request, claim: FolderClaim) -> None:
        self.request = request
        self.claim = claim
        self.patterns: tuple[str, ...] = ()
        self.recorder: StepRecorder | None = None
        self.reason: str | None = None  #: why a triggered capture was kept
        self.lost: str | None = None  #: why the new capture was given up for the older one
        self._replaces = (request.out / MANIFEST).exists()
        self._scratch: Path | None = None  #: holds a capture that is not where it was asked for yet

    @property
    def selection(self) -> Selection:
        """What is stored, its patterns known by now."""
        return replace(self.request.selection, patterns=self.patterns)

    @contextmanager
    def open(self, parts: Sequence[Any], facts: RunFacts, step: int) -> Iterator[None]:
        """Record what happens inside as `step`."""
        if not self._replaces:
            self.claim.release()
            with self._record(parts, facts, step, self.request.out):
                yield
            return
        with self._record_beside(parts, facts, step):
            yield
        if not self._failed_to_write():
            self._keep()

    def _failed_to_write(self) -> bool:
        """The new capture lacks something that the disk refused: the older one is worth more."""
        if self._scratch is None or _rank() != 0:
            return False
        made = read_manifest(self._scratch)
        full = disk_full(made.problems, made.problem_codes)
        if full is None:
            return False
        self._forget()
        self.lost = f"the disk is full ({full}); the capture at {self.request.out} is kept as it was"
        return True

    @contextmanager
    def _record(self, parts: Sequence[Any], facts: RunFacts, step: int, out: Path) -> Iterator[None]:
        tracer = Tracer(list(parts), **{**self._arguments(facts, step), "out": out})
        try:
            with tracer:
                yield
        except Abandoned:
            if tracer.rank == 0:
                shutil.rmtree(out, ignore_errors=True)
            raise
        tracer.finish(metrics=self._metrics(step))

    @contextmanager
    def _record_beside(self, parts: Sequence[Any], facts: RunFacts, step: int) -> Iterator[None]:
        out = self.request.out
        self._scratch = out.with_name(f".{out.name}.step-{step}.partial")
        with self._record(parts, facts, step, self._scratch):
            yield

    def _keep(self) -> None:
        """Put the capture recorded beside in its place."""
        scratch, self._scratch = self._scratch, None
        if scratch is None or _rank() != 0:
            return
        out = self.request.out
        self.claim.start()
        (out / ".gitignore").unlink()
        self.claim.release()
        if out.exists():
            out.rmdir()
        scratch.rename(out)

    def _forget(self) -> None:
        scratch, self._scratch = self._scratch, None
        if scratch is not None and _rank() == 0:
            shutil.rmtree(scratch, ignore_errors=True)

    def after(self, step: int, loss: float | None, grad_norm: float | None) -> bool:
        """Whether the run may end although the window goes on."""
        return False

    def finish(self) -> None:
        """The run is over, however it ended; a step that failed is kept, as the one that was asked for."""
        if self.recorder is not None and self.recorder.failure is not None:
            self._keep()
        self._forget()

    def _metrics(self, step: int) -> dict[str, float | None]:
        losses = self.recorder.losses if self.recorder is not None else {}
        loss, grad_norm = losses.get(step, (None, None))
        return {"loss": loss, "grad_norm": grad_norm}

    def _arguments(self, facts: RunFacts, step: int) -> dict[str, Any]:
        return {
            "out": self.request.out,
            "step": step,
            "selection": self.selection,
            "budget_bytes": self.request.budget_bytes,
            "force": self.request.force,
            "seed": facts.seed,
            "config": facts.config,
            "config_path": facts.config_path,
            "command": tuple(sys.argv),
            "flags": facts.flags,
            "eager": self.request.eager,
        }


class SeriesKeeper(OneStepKeeper):
    """Records every step of the window into one folder; one of them keeps its tensors."""

    _tracer: SeriesTracer | None = None
    _last = 0

    @contextmanager
    def open(self, parts: Sequence[Any], facts: RunFacts, step: int) -> Iterator[None]:
        """Record what happens inside as `step`."""
        if self._tracer is None:
            self.claim.release()
            at = self.request.window.tensors_at
            assert at is not None, "a window without a trigger says whose tensors it keeps"
            self._tracer = SeriesTracer(list(parts), tensors_at=at, **self._arguments(facts, step))
        self._tracer.prepare(step)
        with self._tracer:
            yield
        self._last = step

    def finish(self) -> None:
        """Close the folder, also when the run ended within the window."""
        if self._tracer is not None:
            at = self.request.window.tensors_at
            self._tracer.finish(
                metrics=self._metrics(at if at is not None and at <= self._last else self._last)
            )


class TriggerKeeper(OneStepKeeper):
    """Records each step beside the folder, and keeps the first one at which the trigger fires."""

    def __init__(self, request: Request, claim: FolderClaim) -> None:
        super().__init__(request, claim)
        assert request.trigger is not None, "a trigger was asked for"
        self._trigger = TRIGGERS[request.trigger]()

    @contextmanager
    def open(self, parts: Sequence[Any], facts: RunFacts, step: int) -> Iterator[None]:
        """Record what happens inside as `step`, in a folder beside the one asked for."""
        with self._record_beside(parts, facts, step):
            yield

    def after(self, step: int, loss: float | None, grad_norm: float | None) -> bool:
        """Keep the step when the trigger fires on any rank, else forget it."""
        self.reason = _any_rank(f"bridge/fired/{step}", self._trigger.fires(loss, grad_norm))
        if self.reason is not None:
            self._keep()
        else:
            self._forget()
        return self.reason is not None


def make_keeper(request: Request, claim: FolderClaim) -> OneStepKeeper:
    """The keeper that a request needs."""
    if request.trigger is not None:
        return TriggerKeeper(request, claim)
    return OneStepKeeper(request, claim) if request.window.single else SeriesKeeper(request, claim)


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _rank() -> int:
    return torch.distributed.get_rank() if _distributed() else 0


def _store() -> Any:
    return torch.distributed.distributed_c10d._get_default_store()


def _any_rank(key: str, reason: str | None) -> str | None:
    """The first rank's reason, on every rank; None when no rank has one."""
    if not _distributed():
        return reason
    store = _store()
    keys = [f"{key}/{rank}" for rank in range(torch.distributed.get_world_size())]
    store.set(keys[_rank()], reason or "")
    store.wait(keys)
    said = [(rank, store.get(name).decode()) for rank, name in enumerate(keys)]
    return next((f"{text} (rank {rank})" if rank else text for rank, text in said if text), None)
