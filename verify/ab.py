"""`bridge ab`: run baseline and candidate, diff them, verify the suspects. Loads no torch itself.

Both runs are child processes with the same config, seed and data; they differ in the overrides alone. The
first pass keeps digests of every call; a second one, when there is something to look at, keeps the tensors
of the suspects and of the kernels that were swapped in.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bridge.config import BridgeConfig, load_config
from bridge.errors import BridgeError, KernelError, NothingJudgedError, UsageError
from bridge.verify.ab_runs import Say, ask, capture_child, find_steps
from bridge.verify.ab_sides import (
    Sides,
    config_step,
    from_checkpoint,
    split_sides,
    without_clashes,
)
from bridge.verify.diff import diff_captures
from bridge.verify.diff_document import DiffDocument, Mismatch, StepTrace, Suspect
from bridge.verify.registry import known_names, load_spec
from bridge.verify.runs import load_run
from bridge.verify.verdict import Verdict

#: Calls of one kernel that are verified.
MAX_CALLS = 4
NO_EFFECT = (
    "The candidate runs no op and no module class that the baseline does not: the override replaced nothing; "
    "look at its target and fqns"
)


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
    say = say or (lambda text: None)
    traces: tuple[StepTrace, ...] = ()
    at = step if step is not None else config_step(loaded)
    sides = arranged(path, loaded, split_sides(loaded, overrides), (find_step and last_step) or at)
    for note in sides.notes:
        say(f"{note.what}: {note.b}: {note.meaning}")
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
        # Of every op: what [capture] ops names may well run on one side only.
        capture_child(path, at, folder, settings, ["--tensors", "none", "--ops", "*"])
    notes = (*sides.notes, *unmatched(loaded.capture.ops, folders))
    for note in notes[len(sides.notes) :]:
        say(f"{note.what}: {note.meaning}")
    document = diff_captures(*folders, allow_mismatch=True, command=command)
    new = new_names(*folders)
    swapped = swapped_kernels(new)
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
    document = msgspec.structs.replace(document, mismatches=(*document.mismatches, *notes))
    if sides.wanted and not new and document.outcome == "IDENTICAL":
        document = msgspec.structs.replace(document, summary=f"{document.summary}. {NO_EFFECT}")
    return combine(document, verdicts, traces)


def arranged(path: Path, config: BridgeConfig, sides: Sides, last: int) -> Sides:
    """The sides without overrides that exclude each other, starting from a checkpoint where there is one.

    Asked of a process that loads torchtitan, before anything runs: an override that cannot be applied must
    not cost a baseline run.
    """
    found = ask(path, sides)
    return from_checkpoint(without_clashes(sides, found), found, last)


def new_names(baseline: Path, candidate: Path) -> set[str]:
    """Ops and module classes that occur in the candidate alone."""
    sides = []
    for folder, label in ((baseline, "A"), (candidate, "B")):
        run = load_run(folder, label)
        sides.append({call.op for call in run.calls} | {call.module_class for call in run.calls})
    return sides[1] - sides[0]


def swapped_kernels(new: set[str]) -> tuple[str, ...]:
    """Names of known kernels that have one of these ops or module classes."""
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
        wanted[module] = None  # its gradients: a backward of other ops is compared there
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


def unmatched(ops: Sequence[str], folders: tuple[Path, Path]) -> tuple[Mismatch, ...]:
    """A note for each of [capture] ops that names no call of a run: to swap a module is what ab is for."""
    there = [present(folder, ops) if ops else () for folder in folders]
    notes = []
    for op in ops:
        lacking = [folder.name for folder, names in zip(folders, there, strict=True) if op not in names]
        if lacking:
            a, b = ("calls" if op in names else "none" for names in there)
            where = " and of the ".join(lacking)
            notes.append(
                Mismatch(what="ops", a=a, b=b, meaning=f"[capture] ops {op} matches no call of the {where}")
            )
    return tuple(notes)


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
        except KernelError as error:
            # Two runs are done; that the kernel runs in neither of its cases here must not lose their diff.
            say(f"verify {name}: not judged: {error}")
            verdicts.append(Verdict(verdict="INCONCLUSIVE", op=name, summary=f"not judged: {error}"))
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
    unjudged = [verdict for verdict in verdicts if verdict.verdict == "INCONCLUSIVE" and not verdict.cases]
    outcome = document.outcome
    summary = document.summary
    if failed and outcome != "DIVERGED":
        outcome = "DIVERGED"
        first = failed[0]
        summary = f"the runs agree within rounding in this step, but kernel {first.op} fails: {first.summary}"
    elif failed:
        summary = f"{summary}. Kernel {failed[0].op} fails verification: {failed[0].summary}"
    elif unjudged and outcome in ("IDENTICAL", "SAME WITHIN ROUNDING"):
        outcome = "INCONCLUSIVE"
        summary = f"{summary}. Kernel {unjudged[0].op} is {unjudged[0].summary}"
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
