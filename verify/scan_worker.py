"""What one process of a scan does: judge a few calls. Needs torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import msgspec
import torch

from bridge.capture.digest_host import digest_bytes
from bridge.capture.dtypes import itemsize
from bridge.capture.record import Call, Digest
from bridge.capture.store import Capture, load_capture
from bridge.capture.stored import stored_calls
from bridge.errors import BridgeError, CaptureError, KernelError
from bridge.verify.counterfactual import inputs_of
from bridge.verify.diff_document import CallDetail, TensorDiff
from bridge.verify.elementwise import compare_tensors
from bridge.verify.opjudge import OpGate, judge_output
from bridge.verify.rerun import cannot_rerun, find_op, rerun, rerun_wide
from bridge.verify.scan_table import OpResult


def prepare() -> None:
    """Run in every worker: one thread each, since the processes share the cores."""
    torch.set_num_threads(1)


#: Libraries of torch itself. Of another one's op the FP64 run is the same kernel's, which judges rounding but
#: not the formula.
_TORCH = frozenset(
    """aten prims prim fsdp c10d c10d_functional _c10d_functional symm_mem inductor quantized mkldnn
    mkl""".split()
)
CUSTOM = (
    "calls of custom kernels (in FP64 they run the same code, so a wrong formula would not show; "
    "`bridge verify --target recorded` judges them)"
)


@lru_cache(maxsize=1)
def _open(path: Path) -> tuple[Capture, Sequence[Call]]:
    capture = load_capture(path)
    return capture, stored_calls(capture)


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
    capture, calls = _open(path)
    return [(position, judge_call(capture, calls[position])) for position in positions]


def detail_chunk(path: Path, rows: list[tuple[int, int]]) -> list[CallDetail]:
    """Drill-down of calls, given as (row of the table, position in the capture)."""
    capture, calls = _open(path)
    return [detail_call(capture, calls[position], row) for row, position in rows]


def detail_call(capture: Capture, call: Call, row: int) -> CallDetail:
    """Every output against its FP64 re-computation, element by element, and what was read."""
    if find_op(call.op) is None:
        _load_libraries()
    tensors = []
    try:
        ran = _run(capture, call)
        for place, record in enumerate(call.outputs[: len(ran.golden)]):
            golden, target = ran.golden[place], ran.recorded[place]
            known = TensorDiff(
                role="output",
                name_a=record.name,
                name_b=record.name,
                dtype_a=str(golden.dtype).removeprefix("torch."),
                dtype_b=record.dtype,
                shape_a=tuple(golden.shape),
                shape_b=record.shape,
                digest_a=_digest(golden),
                digest_b=record.digest,
            )
            if golden.shape == target.shape and target.is_floating_point():
                gate = ran.judge(call, place)
                scale = _largest(golden)
                if math.isfinite(gate.threshold) and scale > 0:
                    known = msgspec.structs.replace(known, noise=gate.threshold / scale)
                known = compare_tensors(golden, target, known)
            tensors.append(known)
    except (KernelError, CaptureError):
        pass  # without a golden there is no verdict either; what it read remains to be shown
    tensors += [
        TensorDiff(
            role="input",
            name_a=record.name,
            name_b=record.name,
            dtype_b=record.dtype,
            shape_b=record.shape,
            digest_b=record.digest,
        )
        for record in call.inputs
    ]
    told = {name: (str(value), str(value)) for name, value in call.attrs.items()}
    return CallDetail(row=row, tensors=tuple(tensors), arguments=told)


def _largest(tensor: torch.Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _digest(tensor: torch.Tensor) -> Digest | None:
    flat = tensor.detach().contiguous()
    name = str(flat.dtype).removeprefix("torch.")
    return digest_bytes(flat.data_ptr(), flat.numel(), name) if itemsize(name) else None


def judge_call(capture: Capture, call: Call) -> OpResult:
    """Judge one operator call: its worst output decides."""
    if find_op(call.op) is None:
        _load_libraries()
    reason = cannot_rerun(call)
    if reason is not None:
        return _unjudged(call, reason)
    try:
        gates = _run(capture, call).gates(call)
    except (KernelError, CaptureError) as error:
        return _unjudged(call, str(error).split(": ", 1)[-1][:160])
    if not gates:
        return _unjudged(call, "its outputs cannot be told apart")
    worst = max(gates, key=lambda gate: gate.ratio)
    undecided = [gate for gate in gates if gate.verdict == "INCONCLUSIVE"]
    if worst.verdict == "PASS" and undecided:
        worst = undecided[0]
    if worst.verdict != "FAIL" and call.op.partition("::")[0] not in _TORCH:
        return _unjudged(call, CUSTOM)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ran:
    """One call run again, as it was and in FP64; lists by output."""

    inputs: Mapping[str, torch.Tensor]
    reference: list[torch.Tensor]
    golden: list[torch.Tensor]
    recorded: list[torch.Tensor]

    def judge(self, call: Call, place: int) -> OpGate:
        return judge_output(
            call,
            self.inputs,
            call.outputs[place].name,
            golden=self.golden[place],
            reference=self.reference[place],
            target=self.recorded[place],
            place=place,
        )

    def gates(self, call: Call) -> list[OpGate]:
        both = zip(self.reference, self.recorded, self.golden, strict=False)
        return [
            self.judge(call, place)
            for place, (eager, target, _) in enumerate(both)
            if eager.shape == target.shape and eager.dtype == target.dtype
        ]


def _run(capture: Capture, call: Call) -> _Ran:
    recorded = [capture.tensor(record) for record in call.outputs]
    inputs = inputs_of(capture, call)
    reference = rerun(call, inputs_of(capture, call))
    if any(tensor.is_complex() for tensor in inputs.values()) and not all(
        torch.equal(one, other) for one, other in zip(reference, recorded, strict=False)
    ):
        raise KernelError(f"{call.key}: lazy conjugation of complex inputs is not in the record")
    return _Ran(inputs=inputs, reference=reference, golden=rerun_wide(call, inputs), recorded=recorded)


def _unjudged(call: Call, reason: str) -> OpResult:
    return OpResult(key=call.key, rank=call.rank, index=call.index, reason=reason)


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None
