"""Cheap figures of every step of a run: loss, gradient norm, and the sum of |weight|. Run in a child process.

    python -m bridge.verify.ab_steps CONFIG LAST_STEP OUT SETTINGS_JSON

writes {"steps": [...], "loss": [...], "grad_norm": [...], "weights": [...]} to OUT.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from bridge.verify.ab_child import answer

METRICS = ("loss", "grad_norm", "weights")


def step_figures(config_path: Path, last: int, settings: dict[str, Any]) -> dict[str, list[Any]]:
    """Train to step `last` and give the figures of every step; needs torch and torchtitan.

    Raises BridgeError as `bridge capture` does.
    """
    from bridge.capture.steps import RunFacts, StepRecorder
    from bridge.capture.titan import run_titan
    from bridge.capture.window import parse_window
    from bridge.config import load_config
    from bridge.errors import UsageError
    from bridge.verify.registry import prepare_triton

    prepare_triton()
    config = load_config(config_path)
    if config.train.script is not None:
        raise UsageError(
            "--find-step needs a torchtitan run ([train] module or job), got a script; give --step N"
        )
    train = msgspec.structs.replace(config.train, set={**config.train.set, **settings})
    weights: dict[int, float] = {}

    @contextmanager
    def around(parts: Sequence[Any], facts: RunFacts, step: int) -> Iterator[None]:
        yield
        weights[step] = _weight_sum(parts)

    recorder = StepRecorder(parse_window(f"1:{last}"), around)
    run_titan(train, recorder, config_path=config.path, verbose=False)
    if recorder.failure is not None:
        raise recorder.failure
    steps = list(recorder.recorded)
    return {
        "steps": steps,
        "loss": [_plain(recorder.losses.get(step, (None, None))[0]) for step in steps],
        "grad_norm": [_plain(recorder.losses.get(step, (None, None))[1]) for step in steps],
        "weights": [_plain(weights.get(step)) for step in steps],
    }


def _weight_sum(parts: Sequence[Any]) -> float:
    """Sum of |w| over all local parameters, in FP64."""
    import torch

    total = 0.0
    with torch.no_grad():
        for part in parts:
            for parameter in part.parameters():
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                total += float(local.detach().double().abs().sum())
    return total


def _plain(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def main(argv: Sequence[str]) -> int:
    """Entry point of the child process."""
    config, last, out, settings = argv
    return answer(out, lambda: step_figures(Path(config), int(last), msgspec.json.decode(settings)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
