"""`bridge diff`: two runs in, one document out. Loads torch only when tensors are there to compare."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from bridge.environment import package_versions
from bridge.errors import CaptureError
from bridge.verify import floors
from bridge.verify.align import Alignment, align
from bridge.verify.attribution import Attributions, attribute, makers_of, optimizer_differs
from bridge.verify.births import GAIN
from bridge.verify.columns import Columns, Pool, inner_calls, owners, short_op
from bridge.verify.details import call_detail, interesting_rows
from bridge.verify.diff_document import (
    MATCH_KINDS,
    ORIGINS,
    STATUSES,
    CallDetail,
    Coverage,
    DiffDocument,
    DiffOutcome,
    Mismatch,
    Suspect,
)
from bridge.verify.diff_table import Rows, call_table, rows_of
from bridge.verify.divergence import STANDARD_ERRORS, Divergence, diverge
from bridge.verify.entered import batch_mismatch
from bridge.verify.following import next_command
from bridge.verify.intake import columns
from bridge.verify.nonfinite import first_nonfinite
from bridge.verify.overrides import read_overrides
from bridge.verify.ranks import PRECISION, joined
from bridge.verify.runs import Run, lacking, load_run, mismatches, refuse, side_of
from bridge.verify.titanlog import as_log

if TYPE_CHECKING:
    from bridge.verify.counterfactual import Replays

#: Suspects that a document lists; the rest is in its table.
MAX_SUSPECTS = 20


def diff_captures(
    a: Path | str | Run,
    b: Path | str | Run,
    *,
    overrides: Path | dict[str, str] | None = None,
    allow_mismatch: bool = False,
    replay: bool = True,
    command: Sequence[str] = (),
) -> DiffDocument:
    """Compare two captures (or activation logs) of one step.

    Args:
        a, b: Baseline and candidate.
        overrides: Keys of A to keys of B that belong together, or the CSV file that lists them.
        allow_mismatch: Go on when model, step, dtype or seed differ.
        replay: Attribute by replay where tensors are stored.
        command: What the user typed, for the record.

    Raises:
        UsageError: runs that should not be compared, or overrides that do not fit.
        CaptureError: a folder that cannot be read.
    """
    run_a = a if isinstance(a, Run) else load_run(Path(a), "A")
    run_b = b if isinstance(b, Run) else load_run(Path(b), "B")
    pool = Pool()
    left, right = columns(run_a.calls, pool), columns(run_b.calls, pool)
    side_a, side_b = side_of(run_a, left), side_of(run_b, right)
    found = mismatches(run_a, run_b, side_a, side_b, left, right)
    if not allow_mismatch:
        refuse(found)
    logs = run_a.is_log or run_b.is_log
    ranks = len(side_a.ranks) != len(side_b.ranks) and not logs
    if ranks or run_a.is_log != run_b.is_log:
        alike, pool = joined if ranks else as_log, Pool()
        left, right = columns(alike(run_a.calls), pool), columns(alike(run_b.calls), pool)
    pairs = read_overrides(overrides) if isinstance(overrides, Path) else overrides
    alignment = align(left, right, pairs)
    precision = floors.LOG_DIGITS if logs else PRECISION if ranks else 0.0
    divergence = diverge(left, right, alignment, precision=precision, hashes=not ranks)
    attributions = attribute(left, right, divergence)
    # Joined ranks lie end to end along the batch by a guess: their sizes prove nothing about the data.
    resized = not ranks and batch_mismatch(left, right, tokens_differ=False) is not None
    if resized:
        attributions = _nobody(attributions)
    replay = replay and not logs and not resized
    replays = _replayed(run_a, run_b, left, right, divergence, attributions) if replay else None
    if replays is not None:
        attributions = replays.attributions
    batch = batch_mismatch(left, right, attributions.batch_differs)
    if batch is not None:
        found.append(batch)
    rows = rows_of(left, right, divergence, attributions)
    suspects = _suspects(run_b, left, right, rows, attributions, replays)
    nonfinite = (*first_nonfinite(left, run_a), *first_nonfinite(right, run_b))
    details = _details(run_a, run_b, left, right, divergence, attributions, rows, suspects, replays)
    outcome, summary = _answer(left, right, divergence, attributions, rows, suspects, batch)
    if (lacks := lacking(side_a, side_b)) and outcome in ("IDENTICAL", "SAME WITHIN ROUNDING"):
        outcome, summary = "INCONCLUSIVE", f"{lacks}; of what both have, {summary}; capture it again"
    if lost := (*run_a.damage, *run_b.damage):
        # Digests lie in other files than tensors: the comparison holds, and what is lost cannot be replayed.
        known = " by their digests" if outcome == "IDENTICAL" else ""
        summary = f"{summary}{known}; tensors are lost: {'; '.join(lost)}"
    return DiffDocument(
        outcome=outcome,
        summary=summary,
        a=side_a,
        b=side_b,
        mismatches=tuple(found),
        coverage=_coverage(left, right, alignment, divergence, rows, run_a, run_b, details, replays),
        first_bit_difference=rows.first(("rounding", "differs")),
        first_divergence=rows.first(("differs",)),
        suspects=suspects,
        nonfinite=nonfinite,
        table=call_table(left, right, divergence, rows),
        details=details,
        constants={
            "order_factor": floors.ORDER_FACTOR,
            "fused_ulps": floors.FUSED_ULPS,
            "bias_ulps": floors.BIAS_ULPS,
            "compute_ulps": floors.COMPUTE_ULPS,
            "gain": GAIN,
            "standard_errors": STANDARD_ERRORS,
        },
        command=tuple(command),
        versions=package_versions(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _nobody(attributions: Attributions) -> Attributions:
    """The same without findings: on other data every call differs, and none is to blame."""
    return replace(
        attributions,
        findings=(),
        origin=np.zeros_like(attributions.origin),
        tainted=np.zeros_like(attributions.tainted),
    )


def _replayed(
    run_a: Run, run_b: Run, a: Columns, b: Columns, divergence: Divergence, attributions: Attributions
) -> Replays | None:
    if run_a.capture is None or run_b.capture is None:
        return None
    if not (a.reads.stored.any() and b.reads.stored.any()):
        return None
    from bridge.verify.counterfactual import replay_pairs

    return replay_pairs(run_a.capture, run_b.capture, a, b, divergence, attributions)


def _suspects(
    run_b: Run, a: Columns, b: Columns, rows: Rows, attributions: Attributions, replays: Replays | None
) -> tuple[Suspect, ...]:
    suspects = []
    owner = owners(b)
    for finding in attributions.findings[:MAX_SUSPECTS]:
        row = rows.row_of(finding)
        call = rows.call_of(a, b, finding)
        module, module_class = finding.module or call.module, call.module_class
        at_b = int(rows.at_b[row])
        if not module and at_b in owner:
            module = b.text(int(b.module[owner[at_b]]))
            module_class = b.text(int(b.module_class[owner[at_b]]))
        maker = call
        if call.kind == "module" and at_b >= 0:
            made = makers_of(b, at_b, backward=finding.backward)
            outer = inner_calls(b)
            maker = b.calls[int(outer[made[0]]) if outer[made[0]] >= 0 else made[0]] if made else call
        kernel = _kernel_of(maker.op, module_class)
        attribution = replays.of(finding.pair) if replays is not None else None
        following = next_command(
            run_b.path, kernel=kernel, suspect=call, maker=maker, stored=run_b.capture is not None
        )
        suspects.append(
            Suspect(
                row=row,
                key=call.key,
                op=call.op,
                module=module,
                module_class=module_class,
                phase="backward" if finding.backward else call.phase,
                kernel=kernel,
                reason=finding.reason + ("" if maker.index == call.index else f" (made by {maker.op})"),
                attribution=attribution or rows.attribution_of(finding),
                source=call.source,
                next_command=following,
            )
        )
    return tuple(suspects)


def _kernel_of(op: str, module_class: str) -> str | None:
    """Name of the registered kernel that has this op or module class among its sites."""
    from bridge.errors import BridgeError
    from bridge.verify.registry import known_names, load_spec

    for name in known_names():
        # Names first: a spec is only imported (with torch) when its name is in the op's.
        if name.replace("_", "") not in (op + module_class).lower().replace("_", ""):
            continue
        try:
            spec = load_spec(name).spec
        except (BridgeError, ImportError):
            continue  # a broken plugin is no reason to fail a diff; `bridge verify` reports it
        if op in spec.sites or module_class in spec.sites or short_op(op) == name:
            return name
    return None


def _details(
    run_a: Run,
    run_b: Run,
    a: Columns,
    b: Columns,
    divergence: Divergence,
    attributions: Attributions,
    rows: Rows,
    suspects: tuple[Suspect, ...],
    replays: Replays | None,
) -> tuple[CallDetail, ...]:
    chosen = interesting_rows(rows, divergence, [suspect.row for suspect in suspects])
    return tuple(
        call_detail(row, run_a, run_b, a, b, divergence, attributions, rows, replays) for row in chosen
    )


def _coverage(
    a: Columns,
    b: Columns,
    alignment: Alignment,
    divergence: Divergence,
    rows: Rows,
    run_a: Run,
    run_b: Run,
    details: tuple[CallDetail, ...],
    replays: Replays | None,
) -> Coverage:
    def counts(numbers: Any, names: tuple[str, ...]) -> dict[str, int]:
        values = numbers.tolist()
        found = {name: values.count(number) for number, name in enumerate(names)}
        return {name: count for name, count in found.items() if name and count}

    not_covered = []
    if len(alignment.only_a):
        not_covered.append(f"{len(alignment.only_a)} calls only in A")
    if len(alignment.only_b):
        not_covered.append(f"{len(alignment.only_b)} calls only in B")
    incomparable = int((rows.status == STATUSES.index("incomparable")).sum())
    if incomparable:
        not_covered.append(f"{incomparable} pairs without digests on both sides, or of other shapes")
    if optimizer_differs(a, b, alignment):
        not_covered.append(
            "the optimizer runs other ops in B: its steps, and the new weights, were not compared"
        )
    if run_a.is_log or run_b.is_log:
        not_covered.append("a log has no exact hashes: equality is to 6 digits, and sign flips may go unseen")
    if replays is None:
        kept = a.reads.stored.any() and b.reads.stored.any()
        why = "" if kept else ": tensors are not stored on both sides"
        not_covered.append(f"no call was replayed{why}")
    else:
        not_covered.extend(replays.not_covered)
    elementwise = sum(tensor.elementwise for detail in details for tensor in detail.tensors)
    stored = [run.path for run, side in ((run_a, a), (run_b, b)) if side.writes.stored.any()]
    if stored and not elementwise and not (replays and replays.count):
        not_covered.append(
            "no stored tensor was read, digests were compared; to check the stored bytes run "
            + " and ".join(dict.fromkeys(f"`bridge inspect --check {path}`" for path in stored))
        )
    return Coverage(
        pairs=len(alignment),
        by_match=counts(alignment.match, MATCH_KINDS),
        by_status=counts(rows.status, STATUSES),
        by_origin=counts(rows.origin, ORIGINS),
        only_a=len(alignment.only_a),
        only_b=len(alignment.only_b),
        tensors=int(divergence.reads.comparable.sum() + divergence.writes.comparable.sum()),
        elementwise=elementwise,
        replayed=replays.count if replays is not None else 0,
        not_covered=tuple(not_covered),
    )


def _answer(
    a: Columns,
    b: Columns,
    divergence: Divergence,
    attributions: Attributions,
    rows: Rows,
    suspects: tuple[Suspect, ...],
    batch: Mismatch | None,
) -> tuple[DiffOutcome, str]:
    """Outcome and the one sentence that the report opens with."""
    pairs = len(divergence.alignment)
    if not pairs:
        return (
            "NOTHING MATCHED",
            f"no call of A ({len(a)}) has a counterpart in B ({len(b)}); nothing was compared",
        )
    compared = int(divergence.reads.comparable.sum() + divergence.writes.comparable.sum())
    if not compared:
        return "NOTHING MATCHED", f"{pairs} pairs of calls, but no tensor of them has a digest on both sides"
    alone = len(divergence.alignment.only_a) + len(divergence.alignment.only_b)
    rest = f"; {alone} calls have no counterpart" if alone else ""
    if suspects:
        return "DIVERGED", _accusation(suspects, attributions, divergence)
    if batch is not None:
        return "INCONCLUSIVE", (
            f"{batch.meaning} ({batch.a} in A, {batch.b} in B), so differences say nothing about the code; "
            f"compare runs of one seed, data order and batch size"
        )
    if attributions.entered_share > 0:
        count = len(attributions.entered)
        return "INCONCLUSIVE", (
            f"the runs had parted before this step: {count} tensors already differ when it begins (worst: "
            f"{attributions.entered[0]}, by {attributions.entered_worst:.2g}) and no call adds to it; "
            f"`bridge ab --find-step` finds the step where they part"
        )
    far = int((rows.status == STATUSES.index("differs")).sum())
    if far:
        at = rows.first(("differs",))
        return "INCONCLUSIVE", (
            f"{far} of {pairs} calls differ by far more than rounding, first "
            f"{rows.key(a, b, at) if at is not None else ''}, and no call is seen to make the difference"
            f"{rest}; capture both runs with `--tensors all` for module boundaries and replay"
        )
    unlike = int((rows.status == STATUSES.index("rounding")).sum())
    if not unlike:
        return "IDENTICAL", f"all {compared} compared tensors of {pairs} calls are bit-equal{rest}"
    first = rows.first(("rounding",))
    where = rows.key(a, b, first) if first is not None else ""
    return "SAME WITHIN ROUNDING", (
        f"{unlike} of {pairs} calls differ, first {where}, none by more than rounding explains{rest}"
    )


def _accusation(suspects: tuple[Suspect, ...], attributions: Attributions, divergence: Divergence) -> str:
    first, finding = suspects[0], attributions.findings[0]
    what = f"{first.op} in {first.module}" if first.module else first.op
    verb = {
        "entered": "the difference comes in with",
        "nondeterministic": "the runs part where random numbers are drawn, at",
    }.get(finding.origin, "the runs part at")
    more = len(attributions.findings) - 1
    others = f"; {more} more suspects" if more > 1 else "; 1 more suspect" if more else ""
    return f"{verb} {first.key} ({what}, {first.phase}): {first.reason}{others}"


def write_diff(document: DiffDocument, path: Path) -> None:
    """Write `diff.json`, the whole of it or nothing.

    Raises CaptureError when the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(msgspec.json.encode(document))
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            partial.unlink()
        raise CaptureError(f"{path} cannot be written: {error.strerror}; choose another --report") from None
