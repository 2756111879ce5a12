"""Attribution by replay: A's implementation on B's inputs. Needs torch and the tensors of both runs.

born = B(x_B) - A(x_B), inherited = A(x_B) - A(x_A). Both are held against an FP64 run of A's op on B's
inputs: a call is accused when what B made of them is wrong by more than what is legal for the op, not
merely because two implementations differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from bridge.capture.record import Call, TensorRecord
from bridge.capture.store import Capture
from bridge.errors import CaptureError, KernelError
from bridge.verify.attribution import Attributions, retaint
from bridge.verify.chain import run_chain
from bridge.verify.chain_gate import distance, judge_chain
from bridge.verify.columns import Columns, reads_of, take
from bridge.verify.diff_document import ORIGINS, Attribution, Origin
from bridge.verify.divergence import Divergence
from bridge.verify.finding import SURE, Finding
from bridge.verify.module_births import module_births
from bridge.verify.opjudge import OpGate, judge_output
from bridge.verify.rerun import cannot_rerun, rerun, rerun_wide

#: Pairs that are replayed, first in execution order; more would make a diff slow.
MAX_PAIRS = 400
MAX_BYTES = 4 << 30
#: Growth of a relative difference from inputs to outputs that counts as amplified.
AMPLIFIED = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replays:
    """What replay found; `attributions` are the findings that remain after it."""

    attributions: Attributions
    by_pair: Mapping[int, Attribution]
    not_covered: tuple[str, ...]

    @property
    def count(self) -> int:
        return len(self.by_pair)

    def of(self, pair: int) -> Attribution | None:
        return self.by_pair.get(pair)


def replay_pairs(
    capture_a: Capture,
    capture_b: Capture,
    a: Columns,
    b: Columns,
    divergence: Divergence,
    found: Attributions,
) -> Replays:
    """Replay the pairs that differ and whose tensors are stored, and correct the findings by the result."""
    alignment = divergence.alignment
    order = np.argsort(b.index[alignment.b], kind="stable")
    by_pair: dict[int, Attribution] = {}
    skipped: dict[str, int] = {}
    spent = 0
    for pair in order[~divergence.out_equal[order]].tolist():
        call_a, call_b = a.calls[int(alignment.a[pair])], b.calls[int(alignment.b[pair])]
        reason = _unfit(call_a, call_b, alignment.runs.get(pair), a, b)
        size = sum(_bytes(record.shape) for record in call_b.inputs + call_b.outputs)
        if reason is None and (len(by_pair) >= MAX_PAIRS or spent + size > MAX_BYTES):
            reason = f"beyond the first {len(by_pair)} replayed calls"
        if reason is None:
            spent += size
            try:
                by_pair[pair] = _replay(capture_a, capture_b, a, b, pair, divergence)
            except (KernelError, CaptureError) as error:
                reason = type(error).__name__ + ": " + str(error).split(": ", 1)[-1][:80]
        if reason is not None and call_b.kind == "op":
            skipped[reason] = skipped.get(reason, 0) + 1
    by_pair.update(module_births(capture_a, capture_b, a, b, divergence))
    return Replays(
        attributions=_corrected(a, b, divergence, found, by_pair),
        by_pair=by_pair,
        not_covered=tuple(
            f"{count} differing calls not replayed: {reason}" for reason, count in skipped.items()
        ),
    )


def _bytes(shape: tuple[int, ...]) -> int:
    return 8 * math.prod(shape)


def _unfit(
    call_a: Call, call_b: Call, runs: tuple[list[int], list[int]] | None, a: Columns, b: Columns
) -> str | None:
    if call_b.kind == "module":
        return "module call"
    records = [*call_b.inputs, *call_b.outputs, *call_a.inputs, *call_a.outputs]
    if any(record.blob is None for record in records):
        return "tensors are not stored"
    if runs is None and sorted(r.shape for r in call_a.inputs) != sorted(r.shape for r in call_b.inputs):
        return "its inputs have other shapes than A's"
    eager = [a.calls[at] for at in runs[0]] if runs is not None else [call_a]
    for call in eager:
        reason = cannot_rerun(call)
        if reason is not None:
            return reason
        if any(record.blob is None for record in call.inputs):
            return "tensors are not stored"
        if any(record.dtype.startswith("complex") for record in call.inputs):
            return "lazy conjugation of complex inputs is not in the record"
    return None


def inputs_of(capture: Capture, call: Call) -> dict[str, torch.Tensor]:
    """A call's input tensors by path; those that shared memory do so again."""
    named = capture.tensors(call)
    return {
        name.removeprefix("inputs/"): value for name, value in named.items() if name.startswith("inputs/")
    }


def _replay(
    capture_a: Capture, capture_b: Capture, a: Columns, b: Columns, pair: int, divergence: Divergence
) -> Attribution:
    alignment = divergence.alignment
    call_a, call_b = a.calls[int(alignment.a[pair])], b.calls[int(alignment.b[pair])]
    runs = alignment.runs.get(pair)
    if runs is not None:
        return _replay_run(capture_a, capture_b, a, b, pair, divergence)
    recorded_b = [capture_b.tensor(record) for record in call_b.outputs]
    recorded_a = [capture_a.tensor(record) for record in call_a.outputs]
    if _same_arguments(call_a, call_b):
        feed = inputs_of(capture_b, call_b)
    else:
        feed = _mapped_inputs(capture_b, a, b, pair, divergence)
    own = rerun(call_a, inputs_of(capture_a, call_a))
    spread = max((distance(x, y) for x, y in zip(own, recorded_a, strict=False)), default=0.0)
    if spread > 0:
        again = rerun(call_a, inputs_of(capture_a, call_a))
        repeat = max((distance(x, y) for x, y in zip(own, again, strict=False)), default=0.0)
        if repeat == 0:
            raise KernelError(
                f"{call_a.key}: its replay is {spread:.2g} from what the run recorded (other device or build)"
            )
        return Attribution(
            origin="nondeterministic",
            basis="replay",
            repeat=repeat,
            detail=f"two runs of A's {call_a.op} on the same inputs differ by {repeat:.2g}",
        )
    counter = rerun(call_a, {path: tensor.clone() for path, tensor in feed.items()})
    golden = rerun_wide(call_a, feed)
    gates = [
        judge_output(
            call_a, feed, call_b.outputs[place].name, golden=wide, reference=eager, target=target, place=place
        )
        for place, (wide, eager, target) in enumerate(zip(golden, counter, recorded_b, strict=False))
        if eager.shape == target.shape
    ]
    before = inputs_of(capture_a, call_a)
    inside = max(
        (distance(before[path], tensor) for path, tensor in feed.items() if path in before), default=0.0
    )
    return _verdict(divergence, pair, recorded_a, recorded_b, counter, gates, inside)


def _same_arguments(call_a: Call, call_b: Call) -> bool:
    return [record.name for record in call_a.inputs] == [record.name for record in call_b.inputs]


def _mapped_inputs(
    capture_b: Capture, a: Columns, b: Columns, pair: int, divergence: Divergence
) -> dict[str, torch.Tensor]:
    """B's tensors under the names of A's arguments, as the pairing of tensors has them."""
    reads, alignment = divergence.reads, divergence.alignment
    call_a, call_b = a.calls[int(alignment.a[pair])], b.calls[int(alignment.b[pair])]
    feed = {}
    for row in np.flatnonzero(reads.pair == pair).tolist():
        at_a = int(reads.a[row]) - int(a.reads.start[int(alignment.a[pair])])
        at_b = int(reads.b[row]) - int(b.reads.start[int(alignment.b[pair])])
        feed[call_a.inputs[at_a].name] = capture_b.tensor(call_b.inputs[at_b])
    if len(feed) != len(call_a.inputs):
        raise KernelError(f"{call_b.key}: B's inputs do not say which of A's arguments they are")
    return feed


def _verdict(
    divergence: Divergence,
    pair: int,
    recorded_a: list[torch.Tensor],
    recorded_b: list[torch.Tensor],
    counter: list[torch.Tensor],
    gates: list[OpGate],
    inside: float,
) -> Attribution:
    """Name the origin from the three results and the gate against FP64."""
    born = max((distance(x, y) for x, y in zip(counter, recorded_b, strict=False)), default=0.0)
    inherited = max((distance(x, y) for x, y in zip(recorded_a, counter, strict=False)), default=0.0)
    gain = inherited / inside if inside > 0 else None
    worst = max(gates, key=lambda gate: gate.ratio, default=None)
    failed = worst is not None and worst.verdict == "FAIL"
    origin: Origin = "born" if failed else "inherited" if inherited > 0 else ""
    if origin == "inherited" and gain is not None and gain > AMPLIFIED:
        origin = "amplified"
    detail = (
        f"B on its inputs is {born:.2g} from A on them; A moves by {inherited:.2g} from its own inputs to B's"
    )
    if failed and worst is not None:
        detail = f"{worst.reason}; {detail}"
    return Attribution(
        origin=origin,
        basis="replay",
        born=_finite(born),
        inherited=_finite(inherited),
        gain=_finite(gain),
        reference_error=_finite(worst.reference_error) if worst else None,
        target_error=_finite(worst.target_error) if worst else None,
        threshold=_finite(worst.threshold) if worst else None,
        tensor=worst.tensor if worst else "",
        detail=detail,
    )


def _replay_run(
    capture_a: Capture, capture_b: Capture, a: Columns, b: Columns, pair: int, divergence: Divergence
) -> Attribution:
    """A fused call of B against the chain of A's eager ops, on B's inputs, in A's dtypes and in FP64."""
    alignment, reads = divergence.alignment, divergence.reads
    run_a, _ = alignment.runs[pair]
    calls = [a.calls[at] for at in run_a]
    last, call_b = a.calls[int(alignment.a[pair])], b.calls[int(alignment.b[pair])]
    feed: dict[tuple[int, int], torch.Tensor] = {}
    for row in np.flatnonzero(reads.pair == pair).tolist():
        record_b = _record(b, int(reads.b[row]))
        feed[_content(a, int(reads.a[row]))] = capture_b.tensor(record_b)
    eager = run_chain(capture_a, a, run_a, feed, last, wide=False)
    golden = run_chain(capture_a, a, run_a, feed, last, wide=True)
    recorded_a, recorded_b = capture_a.tensor(last.outputs[0]), capture_b.tensor(call_b.outputs[0])
    if eager.shape != recorded_b.shape:
        raise KernelError(f"{call_b.key}: its output has another shape than that of {last.key}")
    gate = judge_chain(last, call_b.outputs[0].name, golden=golden, eager=eager, target=recorded_b)
    inside = float(np.nan_to_num(divergence.in_difference[pair]))
    verdict = _verdict(divergence, pair, [recorded_a], [recorded_b], [eager], [gate], inside)
    return msgspec.structs.replace(
        verdict, detail=f"{len(calls)} eager calls of A in its place; {verdict.detail}"
    )


def _record(columns: Columns, row: int) -> TensorRecord:
    at = int(columns.reads.call[row])
    return reads_of(columns.calls[at])[row - int(columns.reads.start[at])]


def _content(columns: Columns, row: int) -> tuple[int, int]:
    return int(columns.reads.hash[row]), int(columns.reads.shape[row])


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _corrected(
    a: Columns, b: Columns, divergence: Divergence, found: Attributions, by_pair: Mapping[int, Attribution]
) -> Attributions:
    """Findings after replay: what it clears is dropped, what it convicts is added; arguments stay."""
    alignment = divergence.alignment
    places = {finding.pair: finding for finding in found.findings if finding.pair >= 0}
    findings: list[Finding] = []
    for finding in found.findings:
        replay = by_pair.get(finding.pair)
        cleared = replay is not None and replay.origin in ("inherited", "amplified", "")
        if cleared and finding.basis == "digest" and finding.origin == "born":
            continue
        findings.append(finding)
    order = np.zeros(len(b))
    order[np.lexsort((b.rank, b.index, b.step))] = np.arange(len(b))
    origin = found.origin.copy()
    for pair, replay in by_pair.items():
        origin[pair] = ORIGINS.index(replay.origin)
        if replay.origin != "born":
            continue
        known = places.get(pair)
        if known is not None:
            at = findings.index(known) if known in findings else -1
            if at >= 0 and known.basis != "structure":
                findings[at] = Finding(
                    tier=SURE,
                    place=known.place,
                    origin="born",
                    basis="replay",
                    reason=replay.detail,
                    pair=pair,
                )
            continue
        findings.append(
            Finding(
                tier=SURE,
                place=float(order[int(alignment.b[pair])]),
                origin="born",
                basis="replay",
                reason=replay.detail,
                pair=pair,
            )
        )
    findings.sort(key=lambda finding: (finding.tier, finding.place))

    return retaint(a, b, divergence, found, findings, origin)


def stored_inputs(columns: Columns, call: int) -> bool:
    """Every tensor that a call reads is stored."""
    return all(bool(columns.reads.stored[row]) for row in take(columns.reads, call))
