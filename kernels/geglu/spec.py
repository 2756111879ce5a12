"""What `bridge verify --op geglu` judges, on what inputs, against which plausible faults.

`SPEC` is the tanh approximation, which Gemma trains with; `ERF` the exact gelu (`--kernel .../spec.py:ERF`).
"""

from __future__ import annotations

import dataclasses
import math

import torch

from bridge.kernels.geglu.op import geglu
from bridge.kernels.geglu.reference import golden, reference
from bridge.verify import KernelSpec

Inputs = tuple[torch.Tensor, torch.Tensor]
Device = str | torch.device


def target(gate: torch.Tensor, up: torch.Tensor, *, approximate: str) -> torch.Tensor:
    """The kernel, never its eager fallback."""
    return geglu(gate, up, approximate=approximate, backend="kernel")


def _draw(shape: tuple[int, ...], generator: torch.Generator, device: Device) -> Inputs:
    gate = torch.randn(shape, generator=generator, device=device)
    return gate, torch.randn(shape, generator=generator, device=device)


def sample(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device) -> Inputs:
    """Gate and up, both `shape`, from N(0, 1)."""
    gate, up = _draw(shape, generator, device)
    return gate.to(dtype), up.to(dtype)


def left_tail(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device
) -> Inputs:
    """Gates around -4: gelu is tiny and `1 + erf` cancels."""
    gate, up = _draw(shape, generator, device)
    return (gate - 4.0).to(dtype), up.to(dtype)


def saturated(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device
) -> Inputs:
    """Gates from -60 to 60: a tanh made from e^2u overflows."""
    gate, up = _draw(shape, generator, device)
    return (20.0 * gate).to(dtype), up.to(dtype)


def flat_gate(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device
) -> Inputs:
    """Gates around -0.7518, where the slope of gelu passes through zero."""
    gate, up = _draw(shape, generator, device)
    return (0.05 * gate - 0.7518).to(dtype), up.to(dtype)


def _fault_other_approximation(gate: torch.Tensor, up: torch.Tensor, *, approximate: str) -> torch.Tensor:
    return reference(gate, up, approximate="none" if approximate == "tanh" else "tanh")


def _fault_quick_gelu(gate: torch.Tensor, up: torch.Tensor, *, approximate: str) -> torch.Tensor:
    wide = gate.float()
    return (wide * torch.sigmoid(1.702 * wide) * up.float()).to(gate.dtype)


def _fault_gate_and_up_swapped(gate: torch.Tensor, up: torch.Tensor, *, approximate: str) -> torch.Tensor:
    return reference(up, gate, approximate=approximate)


def _fault_gelu_rounded(gate: torch.Tensor, up: torch.Tensor, *, approximate: str) -> torch.Tensor:
    one = torch.ones_like(gate)
    return (reference(gate, one, approximate=approximate).float() * up.float()).to(gate.dtype)


def _fault_tanh_overflows(gate: torch.Tensor, up: torch.Tensor, *, approximate: str) -> torch.Tensor:
    wide = gate.float()
    e = torch.exp(2.0 * math.sqrt(2.0 / math.pi) * (wide + 0.044715 * wide.pow(3)))
    return (0.5 * wide * (1.0 + (e - 1.0) / (e + 1.0)) * up.float()).to(gate.dtype)


def _fault_slope_is_the_cdf(gate: torch.Tensor, up: torch.Tensor, *, approximate: str) -> torch.Tensor:
    # Same value but at 0; the gradient leaves out gate times the density.
    wide = gate.float()
    phi = reference(wide, torch.ones_like(wide), approximate=approximate) / torch.where(wide == 0, 1.0, wide)
    return (wide * phi.detach() * up.float()).to(gate.dtype)


SPEC = KernelSpec(
    name="geglu",
    reference=reference,
    golden=golden,
    target=target,
    sample=sample,
    inputs=("gate", "up"),
    attrs={"approximate": "tanh"},
    grads=("gate", "up"),
    outputs=("y",),
    kind="elementwise",
    # A production width; one below, at and above both tile widths; one row more than the rows of a tile.
    shapes=((4, 14336), (3, 255), (3, 256), (3, 257), (3, 1023), (3, 1024), (3, 1025), (129, 16), (1, 1)),
    dtypes=("bfloat16", "float16", "float32"),
    sites=("bridge::geglu", "geglu_forward_kernel", "geglu_backward_kernel"),
    adversarial={"left tail": left_tail, "saturated gates": saturated, "flat gates": flat_gate},
    faults={
        "the other approximation": _fault_other_approximation,
        "sigmoid approximation": _fault_quick_gelu,
        "gate and up swapped": _fault_gate_and_up_swapped,
        "gelu rounded before the product": _fault_gelu_rounded,
        "tanh from an exponential that overflows": _fault_tanh_overflows,
        "slope of gelu without the density": _fault_slope_is_the_cdf,
    },
)

ERF = dataclasses.replace(SPEC, name="geglu_erf", attrs={"approximate": "none"})
