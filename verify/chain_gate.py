"""What stands for a chain of eager ops against the chain itself, in its dtypes and in FP64. Needs torch."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import torch

from bridge.capture.record import Call
from bridge.verify.opjudge import OpGate, judge_output
from bridge.verify.ulp import ulp_of

#: A fused kernel's root-mean-square error against FP64 may be this many times the eager one's.
RMS_RATIO = {torch.bfloat16: 1.6, torch.float16: 1.6, torch.float32: 8.0}


def judge_chain(
    last: Call, name: str, *, golden: torch.Tensor, eager: torch.Tensor, target: torch.Tensor
) -> OpGate:
    """Judge `target`, called `name`, against the chain that ends in `last`: FP64 and eager."""
    # A chain rounds at every step; what that may cost is in the eager run's own error.
    budget = golden.abs() * 16 * 2.0**-24
    gate = judge_output(_opaque(last), {}, name, golden=golden, reference=eager, target=target, budget=budget)
    return _companions(gate, golden, eager, target) if gate.verdict == "PASS" else gate


def _opaque(call: Call) -> Call:
    """The call under a name that has no rule of its own."""
    return msgspec.structs.replace(call, op="chain::of_calls")


def _companions(gate: OpGate, golden: torch.Tensor, eager: torch.Tensor, target: torch.Tensor) -> OpGate:
    """Catch what a maximum cannot see: a kernel less exact throughout, or biased, though nowhere far off."""
    keep = golden.isfinite() & eager.isfinite() & target.isfinite()
    if int(keep.sum()) < 64 or target.dtype not in RMS_RATIO:
        return gate
    unit = ulp_of(golden[keep], target.dtype)
    # Toward or away from zero, since that is how truncation and lost terms show.
    sign = torch.sign(golden[keep])
    errors = [(value[keep].double() - golden[keep]) * sign / unit for value in (eager, target)]
    rms = [float(error.square().mean().sqrt()) for error in errors]
    least = 0.29 if target.dtype != torch.float32 else 0.5
    if rms[1] > RMS_RATIO[target.dtype] * max(rms[0], least):
        reason = f"root-mean-square error is {rms[1]:.2g} ULP, eager has {rms[0]:.2g}"
        return _failing(gate, reason)
    shift = float(errors[1].mean()) - float(errors[0].mean())
    deviation = float((errors[1] - errors[0]).std()) / math.sqrt(int(keep.sum()))
    if abs(shift) > (0.1 if target.dtype != torch.float32 else 2.0) and abs(shift) > 8 * deviation:
        return _failing(gate, f"biased by {shift:+.2g} ULP against eager: not rounding")
    return gate


def _failing(gate: OpGate, reason: str) -> OpGate:
    return replace(gate, verdict="FAIL", ratio=max(gate.ratio, 1.001), reason=reason, cause="wrong result")


def distance(x: torch.Tensor, y: torch.Tensor) -> float:
    """max|x - y| over max|x|; NaN in the same place is equal."""
    if x.shape != y.shape:
        return math.inf
    if x.is_complex() or y.is_complex():
        x, y = torch.view_as_real(x.resolve_conj()), torch.view_as_real(y.resolve_conj())
    left, right = x.double(), y.double()
    same = (left == right) | (left.isnan() & right.isnan())
    if bool(same.all()):
        return 0.0
    size = torch.where(same, 0.0, (left - right).abs())
    finite = left[left.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    value = float(size.max())
    return value / scale if scale > 0 and math.isfinite(value) else math.inf
