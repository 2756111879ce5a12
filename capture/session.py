"""One capture, from the request to the folder: chooses what to keep, drives the run, says what came out."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bridge.capture.api import CaptureResult, Progress, Request, Say
from bridge.capture.steps import RunFacts, StepRecorder
from bridge.capture.sites import expand, known_sites, looks_unknown
from bridge.capture.window import TRIGGERS
from bridge.config import BridgeConfig
from bridge.errors import ConfigError, RunError, UsageError, near_misses


class Session:
    """A single use: `run`, then `result`."""

    def __init__(self, request: Request, config: BridgeConfig, *, say: Say, progress: Progress | None) -> None:
        self._request = request
        self._config = config
        self._say = say
        self._trigger = TRIGGERS[request.trigger]() if request.trigger is not None else None
        self._fired: str | None = None
        self._sites: dict[str, tuple[str, ...]] = {}
        self._recorder = StepRecorder(
            request.window, self._open_step, after_step=self._after_step, say=say, progress=progress
        )

    def run(self, *, verbose: bool) -> None:
        """Train until the request is served.

        Raises:
            As `capture_run`.
        """
        from bridge.capture.store import check_out

        train = self._config.train
        check_out(self._request.out, force=self._request.force)
        self._sites = known_sites(self._say)
        path = self._config.path
        if train.script is not None:
            from bridge.capture.script import run_script

            run_script(train.script, train.args, self._recorder, config_path=path, stop=self._request.stop)
        elif train.module is not None or train.job is not None:
            from bridge.capture.titan import run_titan

            run_titan(train, self._recorder, config_path=path, verbose=verbose, stop=self._request.stop)
        else:
            raise ConfigError(
                f"{path or 'the config'} names nothing to train; write [train] module and config (torchtitan), "
                f"job (torchtitan 0.2.x) or script, or put `-- train.py ARGS` after the command"
            )
        self._check_outcome()

    def result(self) -> CaptureResult:
        """What the folder holds now."""
        from bridge.capture.store import load_capture

        capture = load_capture(self._request.out)
        manifest = capture.manifest
        stored = [call for call in capture.calls if any(record.blob for record in (*call.inputs, *call.outputs))]
        return CaptureResult(
            path=self._request.out,
            step=manifest.step,
            steps=manifest.steps,
            calls=len(capture.calls),
            calls_with_tensors=len(stored),
            stored_bytes=manifest.stored_bytes,
            kernels=tuple(name for name, sites in self._sites.items() if any(map(capture.find, sites))),
            metrics=manifest.metrics,
            dropped=len(manifest.dropped),
            problems=capture.problems,
            trigger=self._fired,
        )
