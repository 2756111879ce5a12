"""`bridge ab`: run baseline and candidate, diff them, verify the suspects. Loads no torch itself.

Both runs are child processes with the same config, seed and data; they differ in the overrides alone. The
first pass keeps digests of every call; a second one, when there is something to look at, keeps the tensors
of the suspects and of the kernels that were swapped in.
"""

from __future__ import annotations

import fnmatch
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bridge.config import BridgeConfig, load_config
from bridge.errors import BridgeError, NothingJudgedError, RunError, UsageError
from bridge.verify.ab_steps import METRICS
from bridge.verify.diff import diff_captures
from bridge.verify.diff_document import DiffDocument, StepTrace, Suspect
from bridge.verify.registry import known_names, load_spec
from bridge.verify.runs import load_run
from bridge.verify.verdict import Verdict

Say = Callable[[str], None]

OVERRIDES = "override.imports"
#: A step has parted when a figure differs by more than this many times the run-to-run noise ...
NOISE_FACTOR = 4.0
#: ... and by more than this, relatively: below it rounding alone moves figures of any run.
LEAST_DIFFERENCE = 1e-5
#: Calls of one kernel that are verified.
MAX_CALLS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """What is set, beyond the config file, in each run."""

    baseline: dict[str, Any]
    candidate: dict[str, Any]


def ab_run(
    config: Path | str,
    *,
    overrides: Sequence[str],
    step: int | None = None,
    find_step: bool = False,
    last_step: int | None = None,
    out: Path | str = "ab",
    kernels: Sequence[str] = (),
    sweep: bool = False,
    command: Sequence[str] = (),
    say: Say | None = None,
) -> DiffDocument:
    """Run both, compare them, and judge what was swapped in.

    Args:
        config: `train.toml`.
        overrides: What the candidate has and the baseline has not: import paths of torchtitan overrides,
            or KEY=VALUE settings.
        step: Step to compare; default: the config's, else 1.
        find_step: Look for the first step that differs by more than run-to-run noise, up to `last_step`.
        last_step: Last step that `find_step` looks at; default: `step`.
        out: Folder for the two captures.
        kernels: Kernel files or names to verify besides those that are found.
        sweep: Verify kernels on drawn inputs too, not only on the captured ones.
        command: What the user typed, for the record.
        say: Receives progress, one line each.

    Raises:
        UsageError, ConfigError: the request cannot be served.
        RunError: a run failed; the message says which and why.
    """
    path, out = Path(config), Path(out)
    loaded = load_config(path)
    sides = split_sides(loaded, overrides)
    say = say or (lambda text: None)
    traces: tuple[StepTrace, ...] = ()
    at = step if step is not None else _config_step(loaded)
    if find_step:
        traces = find_steps(path, sides, last_step or at, say)
        found = [trace.first_step for trace in traces if trace.first_step is not None]
        at = min(found) if found else at
        say(
            f"the runs part at step {at}"
            if found
            else f"no step up to {last_step or at} differs by more than noise"
        )
    folders = out / "baseline", out / "candidate"
    for folder, settings in zip(folders, (sides.baseline, sides.candidate), strict=True):
        say(f"{folder.name}: running to step {at}, digests of every call")
        capture_child(path, at, folder, settings, ["--tensors", "none"])
    document = diff_captures(*folders, allow_mismatch=True, command=command)
    swapped = swapped_kernels(folders[0], folders[1])
    wanted = tensors_wanted(document, folders[1], swapped)
    if wanted:
        for folder, settings in zip(folders, (sides.baseline, sides.candidate), strict=True):
            there = present(folder, wanted)
            if there:
                say(f"{folder.name}: running again for the tensors of {len(there)} places")
                globs = [part for glob in there for part in ("--ops", glob)]
                capture_child(path, at, folder, settings, ["--tensors", "all", *globs])
        document = diff_captures(*folders, allow_mismatch=True, command=command)
    verdicts = verify_kernels((*dict.fromkeys((*swapped, *kernels)),), folders[1], sweep=sweep, say=say)
    return combine(document, verdicts, traces)


def split_sides(config: BridgeConfig, overrides: Sequence[str]) -> Sides:
    """Settings of both runs: an override that the config already has is taken from the baseline.

    Raises UsageError without any override, or for one that is neither a path nor KEY=VALUE.
    """
    if not overrides:
        raise UsageError(
            "ab needs --override: an override's import path, or KEY=VALUE; without one both runs are one"
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
    return Sides(baseline=baseline, candidate=candidate)


def _value(text: str) -> Any:
    """A TOML value, or the text itself."""
    import tomllib

    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _config_step(config: BridgeConfig) -> int:
    step = config.capture.step
    if step is None:
        return 1
    if isinstance(step, int) or step.isdigit():
        return int(step)
    raise UsageError(f"ab compares one step, and the config says {step!r}; give --step N")


def capture_child(config: Path, step: int, out: Path, settings: dict[str, Any], more: Sequence[str]) -> None:
    """Run `bridge capture` in a child process.

    Raises RunError with the child's last line when it fails.
    """
    command = [sys.executable, "-m", "bridge", "capture", "--config", str(config), "--step", str(step)]
    command += ["--out", str(out), "--force", *more]
    for key, value in settings.items():
        command += ["--set", f"{key}={msgspec.json.encode(value).decode()}"]
    _child(command, out.name)


def _child(command: Sequence[str], name: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        raise RunError(
            f"the {name} run failed (exit {done.returncode}): {lines[-1].removeprefix('bridge: error: ')}"
        )


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
            _child(command, name)
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


def swapped_kernels(baseline: Path, candidate: Path) -> tuple[str, ...]:
    """Names of known kernels whose op or module class occurs in the candidate alone."""
    sides = []
    for folder, label in ((baseline, "A"), (candidate, "B")):
        run = load_run(folder, label)
        sides.append({call.op for call in run.calls} | {call.module_class for call in run.calls})
    new = sides[1] - sides[0]
    found = []
    for name in known_names():
        try:
            spec = load_spec(name).spec
        except (BridgeError, ImportError):
            continue  # a broken plugin cannot be what this run used
        if new & set(spec.sites):
            found.append(name)
    return tuple(found)


def tensors_wanted(document: DiffDocument, candidate: Path, kernels: Sequence[str]) -> tuple[str, ...]:
    """Globs of the calls whose tensors are worth a second run: suspects' modules, and swapped kernels."""
    wanted: dict[str, None] = {}
    for suspect in document.suspects[:8]:
        wanted[f"{suspect.module}/*" if suspect.module else suspect.key] = None
        if suspect.module:
            wanted[suspect.module] = None
        wanted[suspect.key] = None
    for name in kernels:
        wanted[name] = None
    fused = _fused_modules(document, candidate)
    for module in fused:
        wanted[f"{module}/*"] = None
    return tuple(wanted)


def _fused_modules(document: DiffDocument, candidate: Path) -> list[str]:
    """Modules of which A and B run different ops."""
    table = document.table
    pool = table.pool
    found: dict[str, None] = {}
    for row in range(len(table)):
        alone = table.key_a[row] < 0 or table.key_b[row] < 0
        module = pool[table.module[row]]
        if alone and module:
            found[module] = None
    return list(found)[:16]


def present(folder: Path, globs: Sequence[str]) -> tuple[str, ...]:
    """Those of the globs that name a call of this run; of kernels' names, those with a site in it."""
    run = load_run(folder, "")
    names = {name for call in run.calls for name in (call.key, call.op, call.module, call.module_class)}
    found = []
    for glob in globs:
        sites: tuple[str, ...] = (glob,)
        if glob in known_names():
            sites = load_spec(glob).spec.sites
        if any(fnmatch.fnmatchcase(name, site) for site in sites for name in names):
            found.append(glob)
    return tuple(found)


def verify_kernels(names: Sequence[str], capture: Path, *, sweep: bool, say: Say) -> tuple[Verdict, ...]:
    """Judge each kernel on the candidate's captured inputs."""
    from bridge.verify.api import verify_kernel

    verdicts = []
    for name in names:
        say(f"verify {name}")
        try:
            verdicts.append(
                verify_kernel(name, capture=capture, sweep=sweep, max_calls=MAX_CALLS, isolate=True)
            )
        except (UsageError, NothingJudgedError) as error:
            say(f"verify {name}: not judged: {error}")
    return tuple(verdicts)


def combine(
    document: DiffDocument, verdicts: tuple[Verdict, ...], traces: tuple[StepTrace, ...]
) -> DiffDocument:
    """One document: suspects carry their kernel's verdict, and a failed kernel is a suspect."""
    by_name = {verdict.op: verdict for verdict in verdicts}
    suspects = [
        msgspec.structs.replace(suspect, verdict=by_name[suspect.kernel].verdict)
        if suspect.kernel in by_name
        else suspect
        for suspect in document.suspects
    ]
    named = {suspect.kernel for suspect in suspects}
    failed = [verdict for verdict in verdicts if verdict.verdict == "FAIL"]
    suspects += [_suspect_of(document, verdict) for verdict in failed if verdict.op not in named]
    outcome = document.outcome
    summary = document.summary
    if failed and outcome != "DIVERGED":
        outcome = "DIVERGED"
        first = failed[0]
        summary = f"the runs agree within rounding in this step, but kernel {first.op} fails: {first.summary}"
    elif failed:
        summary = f"{summary}. Kernel {failed[0].op} fails verification: {failed[0].summary}"
    elif verdicts:
        said = ", ".join(f"{verdict.op} {verdict.verdict}" for verdict in verdicts)
        summary = f"{summary}. Verified: {said}"
    return msgspec.structs.replace(
        document,
        kind="ab",
        outcome=outcome,
        summary=summary,
        suspects=tuple(suspects),
        verdicts=verdicts,
        steps=traces,
    )


def _suspect_of(document: DiffDocument, verdict: Verdict) -> Suspect:
    """Where a kernel that failed occurs first."""
    table = document.table
    needle = verdict.op.replace("_", "")
    for row in range(len(table)):
        if table.op_b[row] < 0:
            continue
        op = table.pool[table.op_b[row]]
        if needle in op.lower().replace("_", ""):
            return Suspect(
                row=row,
                key=table.pool[table.key_b[row]],
                op=op,
                module=table.pool[table.module[row]],
                kernel=verdict.op,
                reason=verdict.summary,
                verdict=verdict.verdict,
                next_command=f"bridge verify --op {verdict.op} --from {document.b.path}",
            )
    return Suspect(
        row=-1,
        key=verdict.op,
        op=verdict.op,
        module="",
        kernel=verdict.op,
        reason=verdict.summary,
        verdict=verdict.verdict,
    )
