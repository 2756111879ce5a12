"""One capture, from the request to the folder: chooses what to keep, drives the run, says what came out."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from bridge.capture.folder import FolderClaim
from bridge.capture.keepers import make_keeper
from bridge.capture.replace import replaced
from bridge.capture.request import CaptureResult, Progress, Request, Say
from bridge.capture.sites import expand, known_sites, looks_unknown
from bridge.capture.steps import RunFacts, StepRecorder
from bridge.capture.store import Capture, load_capture
from bridge.config import BridgeConfig
from bridge.errors import CaptureError, ConfigError, RunError, UsageError, near_misses
from bridge.verify.registry import known_names


class Job:
    """A single use: `run`, then `result`."""

    def __init__(
        self, request: Request, config: BridgeConfig, *, say: Say, progress: Progress | None
    ) -> None:
        self._request = request
        self._config = config
        self._say = say
        self._sites: dict[str, tuple[str, ...]] = {}
        self._flags: dict[str, Any] = {}
        # Taken before anything runs, so that a folder that cannot be used costs nobody a training run.
        self._claim = FolderClaim(request.out, force=request.force, owner=_rank() == 0)
        self._keeper = make_keeper(request, self._claim)
        self._recorder = StepRecorder(
            request.window,
            self._open_step,
            after_step=self._keeper.after,
            say=say,
            progress=self._started(progress),
            trigger=request.trigger,
        )
        self._keeper.recorder = self._recorder

    def _started(self, progress: Progress | None) -> Progress:
        """Say the note when the first step starts: a run that is refused before that has one line to say."""
        notes = [self._request.note] if self._request.note is not None else []

        def started(step: int, last: int | None) -> None:
            while notes:
                self._say(notes.pop())
            if progress is not None:
                progress(step, last)

        return started

    def run(self, *, verbose: bool) -> None:
        """Train until the request is served.

        Raises:
            As `capture_run`.
        """
        request = self._request
        try:
            self._sites = known_sites(request.ops, self._say)
            with replaced(request.replace) as kernels:
                self._flags = {"replaced": kernels} if kernels else {}
                self._train(verbose=verbose)
        finally:
            self._keeper.finish()
            self._claim.release()
        if self._keeper.lost is not None:
            raise CaptureError(f"{self._keeper.lost}; free some space, or write elsewhere with --out")
        self._check_outcome()

    def _train(self, *, verbose: bool) -> None:
        request, train, path = self._request, self._config.train, self._config.path
        if train.script is not None:
            from bridge.capture.script import run_script

            run_script(train.script, train.args, self._recorder, config_path=path, stop=request.stop)
        elif train.module is not None or train.job is not None:
            from bridge.capture.titan import run_titan

            run_titan(train, self._recorder, config_path=path, verbose=verbose, stop=request.stop)
        else:
            raise ConfigError(
                f"{path or 'the config'} names nothing to train; write [train] module and config "
                f"(torchtitan), job (torchtitan 0.2.x) or script, or put `-- train.py ARGS` after the command"
            )

    def result(self) -> CaptureResult:
        """What the folder holds now; on ranks other than 0 only where it is, since rank 0 may not be done."""
        if _rank() != 0:
            return CaptureResult(
                path=self._request.out,
                step=self._recorder.recorded[-1],
                steps=tuple(self._recorder.recorded),
                calls=0,
                calls_with_tensors=0,
                stored_bytes=0,
                kernels=(),
                trigger=self._keeper.reason,
            )
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
            dropped_because=_most_common(drop.reason for drop in manifest.dropped),
            problems=capture.problems,
            problem_codes=manifest.problem_codes,
            trigger=self._keeper.reason,
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
        if not self._keeper.patterns:
            self._warn_of_unknown(parts)
            self._keeper.patterns = expand(self._request.ops, self._sites)
        with self._keeper.open(parts, replace(facts, flags={**facts.flags, **self._flags}), step):
            yield

    def _warn_of_unknown(self, parts: Sequence[Any]) -> None:
        names = set(known_names())
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
            raise RunError(
                f"training failed in the captured step: {said}; what had been recorded is in {out}"
            ) from failure
        if _rank() == 0:
            self._refuse_unmatched(load_capture(out))

    def _refuse_unmatched(self, capture: Capture) -> None:
        for op in self._request.ops:
            if not any(capture.find(pattern) for pattern in self._sites.get(op, (op,))):
                names = {n for call in capture.calls for n in (call.op, call.module_class, call.module) if n}
                if op in self._sites:
                    # A name that is right needs no other: the run does without this kernel.
                    sites = ", ".join(self._sites[op])
                    hint = f"the kernel is known, and none of its sites ran ({sites}); is it in use?"
                else:
                    hint = near_misses(op, names.union(known_names()) - {op})
                raise UsageError(
                    f"{self._origin(op)} {op} matches no call of step {capture.manifest.step}; {hint} "
                    f"{capture.path} was written with the digests of all {len(capture.calls)} calls"
                )

    def _origin(self, op: str) -> str:
        """Where an entry of the request's ops was written."""
        if not self._request.ops_of_config:
            return "--ops"
        entry = "ops" if op in self._config.capture.ops else "modules"
        return f"{self._config.path or 'the config'}: [capture] {entry}"


def _most_common(reasons: Iterable[str]) -> str | None:
    counts = Counter(reasons).most_common(1)
    return counts[0][0] if counts else None


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
