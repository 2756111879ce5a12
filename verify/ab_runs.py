"""Child processes of `bridge ab`: captures, figures of every step, questions about a config. No torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bridge.errors import RunError
from bridge.verify.ab_probe import OVERRIDES, Probe
from bridge.verify.ab_sides import Sides
from bridge.verify.ab_steps import METRICS
from bridge.verify.diff_document import StepTrace

#: Time that an interrupted run has to close its capture.
GRACE_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1

Say = Callable[[str], None]

#: A step has parted when a figure differs by more than this many times the run-to-run noise ...
NOISE_FACTOR = 4.0
#: ... and by more than this, relatively: below it rounding alone moves figures of any run.
LEAST_DIFFERENCE = 1e-5


def capture_child(config: Path, step: int, out: Path, settings: dict[str, Any], more: Sequence[str]) -> None:
    """Run `bridge capture` in a child process.

    Raises RunError with the child's last line when it fails.
    """
    command = [sys.executable, "-m", "bridge", "capture", "--config", str(config), "--step", str(step)]
    command += ["--out", str(out), "--force", *more]
    for key, value in settings.items():
        command += ["--set", f"{key}={msgspec.json.encode(value).decode()}"]
    run_child(command, out.name)


def run_child(command: Sequence[str], name: str | None) -> None:
    """Run a command to its end; it ends with this process, however that ends.

    Raises RunError with its last line when it fails, after the name of the run where it is one.
    """
    parent = os.getpid()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Its own group, so that whatever it started goes with it.
        start_new_session=True,
        preexec_fn=lambda: _die_with(parent),
    )
    try:
        _, said = process.communicate()
    finally:
        if process.poll() is None:
            _end(process)
    if process.returncode != 0:
        lines = [line for line in said.splitlines() if line.strip()] or ["no message"]
        said = lines[-1].removeprefix("bridge: error: ")
        raise RunError(said if name is None else f"the {name} run failed (exit {process.returncode}): {said}")


def _die_with(parent: int) -> None:
    """In the child: a run must not outlive a command that was killed; Linux can be asked for that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before it could be asked for
            os.kill(os.getpid(), signal.SIGKILL)


def _end(process: subprocess.Popen[str]) -> None:
    """Let the child close what it has begun, then end it and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    finally:
        # After a second signal too; the group may outlive its leader.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def ask(config: Path, sides: Sides) -> Probe:
    """What the config says about checkpoints and about overrides that clash with the wanted ones.

    Raises RunError where the config does not load or the candidate cannot have what is asked for.
    """
    settings = {key: value for key, value in sides.candidate.items() if key != OVERRIDES}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "probe.json"
        asked = [msgspec.json.encode(item).decode() for item in (list(sides.wanted), settings)]
        run_child([sys.executable, "-m", "bridge.verify.ab_probe", str(config), str(file), *asked], None)
        return msgspec.json.decode(file.read_bytes(), type=Probe)


def find_steps(config: Path, sides: Sides, last: int, say: Say) -> tuple[StepTrace, ...]:
    """Figures of every step of baseline, baseline again, and candidate; where they part."""
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        runs = (("baseline", sides.baseline), ("repeat", sides.baseline), ("candidate", sides.candidate))
        for name, settings in runs:
            say(f"{name}: running to step {last} for its figures")
            file = Path(folder) / f"{name}.json"
            text = msgspec.json.encode(settings).decode()
            command = [
                sys.executable,
                "-m",
                "bridge.verify.ab_steps",
                str(config),
                str(last),
                str(file),
                text,
            ]
            run_child(command, name)
            figures.append(msgspec.json.decode(file.read_bytes()))
    return tuple(trace_of(metric, *figures) for metric in METRICS)


def trace_of(
    metric: str, baseline: dict[str, Any], repeat: dict[str, Any], candidate: dict[str, Any]
) -> StepTrace:
    """One metric of the three runs, its noise, and the first step beyond it."""
    rows = list(zip(baseline[metric], repeat[metric], candidate[metric], strict=False))
    noise = max((_relative(a, again) for a, again, _ in rows), default=0.0)
    limit = max(NOISE_FACTOR * noise, LEAST_DIFFERENCE)
    first = next(
        (step for step, (a, _, b) in zip(baseline["steps"], rows, strict=False) if _relative(a, b) > limit),
        None,
    )
    return StepTrace(
        metric=metric,
        steps=tuple(baseline["steps"][: len(rows)]),
        baseline=tuple(row[0] for row in rows),
        repeat=tuple(row[1] for row in rows),
        candidate=tuple(row[2] for row in rows),
        noise=noise if noise != float("inf") else None,
        first_step=first,
    )


def _relative(a: float | None, b: float | None) -> float:
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    return abs(a - b) / max(abs(a), abs(b), 1e-300)
