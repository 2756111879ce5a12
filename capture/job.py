"""One capture, from the request to the folder: chooses what to keep, drives the run, says what came out."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from msgspec.structs import replace

from bridge.capture.folder import FolderClaim
from bridge.capture.request import CaptureResult, Progress, Request, Say
from bridge.capture.sites import expand, known_sites, looks_unknown
from bridge.capture.steps import RunFacts, StepRecorder
from bridge.capture.store import Capture, load_capture
from bridge.capture.tracer import Tracer
from bridge.config import BridgeConfig
from bridge.errors import ConfigError, RunError, UsageError, near_misses


class Job:
    """A single use: `run`, then `result`."""

    def __init__(
        self, request: Request, config: BridgeConfig, *, say: Say, progress: Progress | None
    ) -> None:
        self._request = request
        self._config = config
        self._say = say
        self._sites: dict[str, tuple[str, ...]] = {}
        self._claim: FolderClaim | None = None
        self._recorder = StepRecorder(request.window, self._open_step, say=say, progress=progress)

    def run(self, *, verbose: bool) -> None:
        """Train until the request is served.

        Raises:
            As `capture_run`.
        """
        request, train, path = self._request, self._config.train, self._config.path
        # Taken before anything runs, so that a folder that cannot be used costs nobody a training run.
        self._claim = FolderClaim(request.out, force=request.force, owner=_rank() == 0)
        try:
            self._choose_interpreter()
            self._sites = known_sites(self._say)
            if train.script is not None:
                from bridge.capture.script import run_script

                run_script(train.script, train.args, self._recorder, config_path=path, stop=request.stop)
            elif train.module is not None or train.job is not None:
                from bridge.capture.titan import run_titan

                run_titan(train, self._recorder, config_path=path, verbose=verbose, stop=request.stop)
            else:
                raise ConfigError(
                    f"{path or 'the config'} names nothing to train; write [train] module and config "
                    f"(torchtitan), job (torchtitan 0.2.x) or script, or "
                    f"put `-- train.py ARGS` after the command"
                )
        finally:
            self._claim.release()
        self._check_outcome()

    def result(self) -> CaptureResult:
        """What the folder holds now."""
        capture = load_capture(self._request.out)
        manifest = capture.manifest
        stored = [call for call in capture.calls if any(r.blob for r in (*call.inputs, *call.outputs))]
        return CaptureResult(
            path=self._request.out,
            step=manifest.step,
            steps=manifest.steps,
            calls=len(capture.calls),
            calls_with_tensors=len(stored),
            stored_bytes=manifest.stored_bytes,
            kernels=self._kernels(capture),
            metrics=manifest.metrics,
            dropped=len(manifest.dropped),
            problems=capture.problems,
        )

    def _kernels(self, capture: Capture) -> tuple[str, ...]:
        """Known kernels that occur: those asked for, then those that launched something, then eager sites."""
        order: dict[str, tuple[bool, bool]] = {}
        for name, sites in self._sites.items():
            calls = [call for site in sites for call in capture.find(site)]
            if calls:
                launched = any(call.kind == "launch" for call in calls)
                order[name] = (name not in self._request.ops, not launched)
        return tuple(sorted(order, key=lambda name: order[name]))

    @contextmanager
    def _open_step(self, parts: Sequence[Any], facts: RunFacts, step: int) -> Iterator[None]:
        request = self._request
        self._warn_of_unknown(parts)
        assert self._claim is not None, "a step is recorded before the job runs"
        self._claim.release()
        tracer = Tracer(
            list(parts),
            out=request.out,
            step=step,
            selection=replace(request.selection, patterns=expand(request.ops, self._sites)),
            budget_bytes=request.budget_bytes,
            force=request.force,
            seed=facts.seed,
            config=facts.config,
            config_path=facts.config_path,
            command=tuple(sys.argv),
            flags=facts.flags,
        )
        with _rank_zero_first(f"bridge/{request.out}/{step}", tracer):
            yield
        loss, grad_norm = self._recorder.losses.get(step, (None, None))
        tracer.finish(metrics={"loss": loss, "grad_norm": grad_norm})

    def _choose_interpreter(self) -> None:
        """Without a GPU Triton kernels run in its interpreter; that must be set before triton is imported."""
        from bridge.verify.registry import interpreting, prepare_triton

        chosen = "TRITON_INTERPRET" in os.environ or interpreting()
        prepare_triton()
        if not chosen and os.environ.get("TRITON_INTERPRET") == "1":
            self._say("no GPU here: Triton kernels run in its interpreter (TRITON_INTERPRET=1)")

    def _warn_of_unknown(self, parts: Sequence[Any]) -> None:
        names = set(self._sites)
        for part in parts:
            for name, module in part.named_modules():
                names |= {name, type(module).__name__}
        for op in self._request.ops:
            if (warning := looks_unknown(op, names)) is not None:
                self._say(warning)

    def _check_outcome(self) -> None:
        failure, out = self._recorder.failure, self._request.out
        if failure is not None:
            said = f"{type(failure).__name__}: {failure}"
            if "not finite" not in str(failure):
                raise RunError(
                    f"training failed in the captured step: {said}; what had been recorded is in {out}"
                ) from failure
            # torchtitan stops at a loss that is NaN: the very step that somebody wants to look at.
            self._say(f"the run stopped after the captured step: {said}")
        if _rank() == 0:
            self._refuse_unmatched(load_capture(out))

    def _refuse_unmatched(self, capture: Capture) -> None:
        for op in self._request.ops:
            if not any(capture.find(pattern) for pattern in self._sites.get(op, (op,))):
                names = {n for call in capture.calls for n in (call.op, call.module_class, call.module) if n}
                raise UsageError(
                    f"--ops {op} matches no call of step {capture.manifest.step}; "
                    f"{near_misses(op, names | self._sites.keys())} "
                    f"{capture.path} was written with the digests of all {len(capture.calls)} calls"
                )


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


@contextmanager
def _rank_zero_first(key: str, tracer: Tracer) -> Iterator[None]:
    """Be inside the tracer; rank 0 makes the folder before other ranks write into it.

    Through the process group's store and not by a collective, which would be part of the captured step.
    """
    store = None
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        store = torch.distributed.distributed_c10d._get_default_store()
    if store is not None and tracer.rank != 0:
        store.wait([key])
    with tracer:
        if store is not None and tracer.rank == 0:
            store.set(key, "made")
        yield
