"""What `bridge ab` sets in its two runs: overrides, settings, and where both start. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bridge.config import BridgeConfig
from bridge.errors import UsageError
from bridge.verify.ab_probe import OVERRIDES, Probe
from bridge.verify.diff_document import Mismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """What is set, beyond the config file, in each run."""

    baseline: dict[str, Any]
    candidate: dict[str, Any]
    wanted: tuple[str, ...] = ()  #: overrides that the candidate alone has
    notes: tuple[Mismatch, ...] = field(default=())  #: what else was arranged, for the report


def split_sides(config: BridgeConfig, overrides: Sequence[str]) -> Sides:
    """Settings of both runs: an override that the config already has is taken from the baseline.

    Raises UsageError without any override, for one that is neither a path nor KEY=VALUE, and for a run that
    has no such settings.
    """
    if not overrides:
        raise UsageError(
            "ab needs --override: an override's import path, or KEY=VALUE; without one both runs are one"
        )
    if config.train.module is None:
        other = "a script" if config.train.script is not None else "a job file"
        raise UsageError(
            f"ab changes fields of torchtitan 0.3's config ([train] module and config), got {other}; capture "
            "both runs with `bridge capture` and compare them with `bridge diff`"
        )
    base = list(config.train.set.get(OVERRIDES, []))
    imports, settings = [], {}
    for item in overrides:
        if "=" in item:
            key, _, text = item.partition("=")
            settings[key.strip()] = _value(text.strip())
        elif item.replace(".", "").replace("_", "").isalnum() and "." in item:
            imports.append(item)
        else:
            raise UsageError(f"--override takes package.module.function or KEY=VALUE, got {item!r}")
    baseline: dict[str, Any] = {}
    candidate: dict[str, Any] = dict(settings)
    if imports:
        plain = [item for item in base if item not in imports]
        baseline[OVERRIDES] = plain
        candidate[OVERRIDES] = [*plain, *imports]
    return Sides(baseline=baseline, candidate=candidate, wanted=tuple(imports))


def _value(text: str) -> Any:
    """A TOML value, or the text itself."""
    import tomllib

    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def config_step(config: BridgeConfig) -> int:
    step = config.capture.step
    if step is None:
        return 1
    if isinstance(step, int) or step.isdigit():
        return int(step)
    raise UsageError(f"ab compares one step, and the config says {step!r}; give --step N")


def without_clashes(sides: Sides, probe: Probe) -> Sides:
    """Take the config's own overrides that claim what the candidate's do out of both runs."""
    if not probe.clashes:
        return sides
    gone = [item for item, _ in probe.clashes]
    changed = {
        name: {**settings, OVERRIDES: [item for item in settings[OVERRIDES] if item not in gone]}
        for name, settings in (("baseline", sides.baseline), ("candidate", sides.candidate))
    }
    notes = tuple(
        Mismatch(
            what="override",
            a="without either",
            b=wanted,
            meaning=(
                f"the config's own {_name(item)} claims the same modules, so it is taken out of both runs; "
                f"for it against {wanted.rsplit('.', 1)[-1]}, run ab once with each"
            ),
        )
        for item, wanted in probe.clashes
    )
    return Sides(**changed, wanted=sides.wanted, notes=(*sides.notes, *notes))


def from_checkpoint(sides: Sides, probe: Probe, last: int) -> Sides:
    """Let both runs start from the checkpoint nearest before step `last`, or from step 1 where none is."""
    if not probe.folder:
        return sides
    before = [step for step in probe.checkpoints if 0 < step < last]
    if before:
        start: dict[str, Any] = {"checkpoint.load_step": before[-1]}
        where = f"checkpoint of step {before[-1]}"
        meaning = f"both runs load it from {probe.folder}; what differed before that step is not seen"
    else:
        # torchtitan would resume from a later one, past the step that is asked for.
        start, where = {"checkpoint.enable": False}, "step 1"
        meaning = f"no checkpoint before step {last} in {probe.folder}"
    return Sides(
        baseline={**sides.baseline, **start},
        candidate={**sides.candidate, **start},
        wanted=sides.wanted,
        notes=(*sides.notes, Mismatch(what="start", a=where, b=where, meaning=meaning)),
    )


def _name(item: Any) -> str:
    """An override as a user would write it: a path, or a path with arguments."""
    return item if isinstance(item, str) else str(item[0])
