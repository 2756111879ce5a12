"""Child processes of `bridge ab`: captures, figures of every step, questions about a config. No torch."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bridge.errors import RunError
from bridge.verify.ab_probe import Probe
from bridge.verify.ab_sides import Sides
from bridge.verify.ab_steps import METRICS
from bridge.verify.diff_document import StepTrace

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


def run_child(command: Sequence[str], name: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        raise RunError(
            f"the {name} run failed (exit {done.returncode}): {lines[-1].removeprefix('bridge: error: ')}"
        )


def ask(config: Path, wanted: Sequence[str]) -> Probe:
    """What the config says about checkpoints and about overrides that clash with the wanted ones."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "probe.json"
        text = msgspec.json.encode(list(wanted)).decode()
        run_child([sys.executable, "-m", "bridge.verify.ab_probe", str(config), str(file), text], "config")
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
