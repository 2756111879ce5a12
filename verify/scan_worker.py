"""What one process of a scan does: judge a few calls. Needs torch."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch

from bridge.capture.record import Call
from bridge.capture.store import Capture, load_capture
from bridge.errors import BridgeError, CaptureError, KernelError
from bridge.verify.counterfactual import inputs_of
from bridge.verify.opjudge import OpGate, judge_output
from bridge.verify.rerun import cannot_rerun, find_op, rerun, rerun_wide
from bridge.verify.scan_table import OpResult


def prepare() -> None:
    """Run in every worker: one thread each, since the processes share the cores."""
    torch.set_num_threads(1)


@lru_cache(maxsize=1)
def _open(path: Path) -> Capture:
    return load_capture(path)


@lru_cache(maxsize=1)
def _load_libraries() -> None:
    """Import the kernels that are installed, which registers their operators."""
    from bridge.verify.registry import known_names, load_spec

    for name in known_names():
        try:
            load_spec(name)
        except (BridgeError, ImportError):
            continue  # a broken plugin only means that its own ops stay unknown, which the result says


def judge_chunk(path: Path, positions: list[int]) -> list[tuple[int, OpResult]]:
    """Judge the calls at these positions of a capture."""
    capture = _open(path)
    return [(position, judge_call(capture, capture.calls[position])) for position in positions]


def judge_call(capture: Capture, call: Call) -> OpResult:
    """Judge one operator call: its worst output decides."""
    if find_op(call.op) is None:
        _load_libraries()
    reason = cannot_rerun(call)
    if reason is not None:
        return _unjudged(call, reason)
    try:
        gates = _gates(capture, call)
    except (KernelError, CaptureError) as error:
        return _unjudged(call, str(error).split(": ", 1)[-1][:160])
    if not gates:
        return _unjudged(call, "its outputs cannot be told apart")
    worst = max(gates, key=lambda gate: gate.ratio)
    undecided = [gate for gate in gates if gate.verdict == "INCONCLUSIVE"]
    if worst.verdict == "PASS" and undecided:
        worst = undecided[0]
    return OpResult(
        key=call.key,
        rank=call.rank,
        index=call.index,
        tensor=worst.tensor,
        verdict=worst.verdict,
        reason=worst.reason,
        cause=worst.cause,
        margin=_finite(worst.ratio),
        target_error=_finite(worst.target_error),
        reference_error=_finite(worst.reference_error),
        threshold=_finite(worst.threshold),
        reference_relative_error=_finite(worst.reference_relative_error),
    )


def _gates(capture: Capture, call: Call) -> list[OpGate]:
    recorded = [capture.tensor(record) for record in call.outputs]
    inputs = inputs_of(capture, call)
    reference = rerun(call, inputs_of(capture, call))
    if any(tensor.is_complex() for tensor in inputs.values()) and not all(
        torch.equal(one, other) for one, other in zip(reference, recorded, strict=False)
    ):
        raise KernelError(f"{call.key}: lazy conjugation of complex inputs is not in the record")
    golden = rerun_wide(call, inputs)
    gates = []
    for place, (record, wide, eager, target) in enumerate(
        zip(call.outputs, golden, reference, recorded, strict=False)
    ):
        if eager.shape == target.shape and eager.dtype == target.dtype:
            gates.append(
                judge_output(
                    call, inputs, record.name, golden=wide, reference=eager, target=target, place=place
                )
            )
    return gates


def _unjudged(call: Call, reason: str) -> OpResult:
    return OpResult(key=call.key, rank=call.rank, index=call.index, reason=reason)


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None
