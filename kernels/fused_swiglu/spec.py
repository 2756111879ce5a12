"""What `bridge verify --op fused_swiglu` judges, on what inputs, against which plausible faults."""

from __future__ import annotations

import torch
from torch.nn.functional import gelu, silu

from bridge.kernels.fused_swiglu.op import swiglu
from bridge.kernels.fused_swiglu.reference import golden, reference
from bridge.verify import KernelSpec

Inputs = tuple[torch.Tensor, torch.Tensor]
Device = str | torch.device


def target(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The kernel, never its eager fallback."""
    return swiglu(gate, up, backend="kernel")


def _draw(shape: tuple[int, ...], generator: torch.Generator, device: Device) -> Inputs:
    gate = torch.randn(shape, generator=generator, device=device)
    return gate, torch.randn(shape, generator=generator, device=device)


def sample(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device) -> Inputs:
    """Gate and up, both `shape`, from N(0, 1)."""
    gate, up = _draw(shape, generator, device)
    return gate.to(dtype), up.to(dtype)


def saturated(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device
) -> Inputs:
    """Gates from -60 to 60: sigmoid is all but 0 or 1, and e^-gate is large."""
    gate, up = _draw(shape, generator, device)
    return (20.0 * gate).to(dtype), up.to(dtype)


def flat_gate(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device
) -> Inputs:
    """Gates around -1.278, where the slope of silu passes through zero."""
    gate, up = _draw(shape, generator, device)
    return (0.05 * gate - 1.2784645).to(dtype), up.to(dtype)


def tiny(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device) -> Inputs:
    """Gates near zero, where silu is half its argument."""
    gate, up = _draw(shape, generator, device)
    return (1e-3 * gate).to(dtype), up.to(dtype)


def _fault_gate_and_up_swapped(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return reference(up, gate)


def _fault_gelu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (gelu(gate.float()) * up.float()).to(gate.dtype)


def _fault_sigmoid_only(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (torch.sigmoid(gate.float()) * up.float()).to(gate.dtype)


def _fault_silu_rounded(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (silu(gate.float()).to(gate.dtype).float() * up.float()).to(gate.dtype)


def _fault_sigmoid_rounded(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    s = torch.sigmoid(gate.float()).to(gate.dtype).float()
    return (gate.float() * s * up.float()).to(gate.dtype)


def _fault_slope_without_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    # Same value; the gradient takes silu's slope for sigmoid alone.
    wide = gate.float()
    s = torch.sigmoid(wide)
    return (s.detach() * wide * up.float()).to(gate.dtype)


def _fault_last_column_dropped(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    y = reference(gate, up)
    keep = torch.ones_like(y)
    keep[..., -1] = 0
    return y * keep


SPEC = KernelSpec(
    name="fused_swiglu",
    reference=reference,
    golden=golden,
    target=target,
    sample=sample,
    inputs=("gate", "up"),
    grads=("gate", "up"),
    outputs=("y",),
    kind="elementwise",
    # A production width; one below, at and above both tile widths; one row more than the rows of a tile.
    shapes=((4, 14336), (3, 255), (3, 256), (3, 257), (3, 1023), (3, 1024), (3, 1025), (129, 16), (1, 1)),
    dtypes=("bfloat16", "float16", "float32"),
    # Not the feed-forward module: its output is the down projection's. Judge its override by that name.
    sites=(
        "bridge::swiglu",
        "torchtitan::silu_and_mul",
        "swiglu_forward_kernel",
        "swiglu_backward_kernel",
    ),
    adversarial={"saturated gates": saturated, "flat gates": flat_gate, "tiny gates": tiny},
    faults={
        "gate and up swapped": _fault_gate_and_up_swapped,
        "gelu in place of silu": _fault_gelu,
        "sigmoid in place of silu": _fault_sigmoid_only,
        "silu rounded before the product": _fault_silu_rounded,
        "sigmoid rounded early": _fault_sigmoid_rounded,
        "slope of silu without its second term": _fault_slope_without_gate,
        "last column dropped": _fault_last_column_dropped,
    },
)
