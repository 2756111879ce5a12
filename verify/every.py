"""All 65,536 values of a 16-bit dtype, for kernels that map each element by itself."""

from __future__ import annotations

from dataclasses import replace

import torch

from bridge.verify.case import Case
from bridge.verify.execute import run
from bridge.verify.spec import KernelSpec

FAMILY = "every value"
_WIDTH = 256


def every_value(spec: KernelSpec, start: Case, generator: torch.Generator) -> Case | None:
    """The case, or None where the formula is not unary and elementwise or the dtype has more values.

    Args:
        start: a drawn case; gives rank, dtype and attributes.
        generator: of grad_output and of the probe.
    """
    if len(start.inputs) != 1 or not start.inputs[0].is_floating_point():
        return None
    if start.inputs[0].element_size() != 2 or not _maps_elements(spec, start, generator):
        return None
    values = all_values(start.inputs[0].dtype).to(start.inputs[0].device)
    rank = start.inputs[0].ndim
    shape = (*[1] * (rank - 2), values.numel() // _WIDTH, _WIDTH) if rank > 1 else (values.numel(),)
    upstream = tuple(
        torch.randn(shape, generator=generator, device=g.device).to(g.dtype) for g in start.grad_outputs
    )
    return replace(
        start,
        name=f"{shape} {start.dtype}, every {start.dtype} value",
        family=FAMILY,
        inputs=(values.reshape(shape),),
        grad_outputs=upstream,
        recorded=None,
    )


def all_values(dtype: torch.dtype) -> torch.Tensor:
    """Every bit pattern of a 16-bit dtype, NaN last and in rows of its own; the gaps hold ones.

    Rows that hold NaN are judged leniently, so no other value may stand in them.
    """
    words = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    nan = torch.isnan(words)
    return torch.cat([_padded(words[~nan]), _padded(words[nan])])


def _padded(values: torch.Tensor) -> torch.Tensor:
    return torch.cat([values, torch.ones(-values.numel() % _WIDTH, dtype=values.dtype)])


def _maps_elements(spec: KernelSpec, start: Case, generator: torch.Generator) -> bool:
    """Permuted inputs give permuted outputs, and one changed input changes one output: the reference says."""
    x = start.inputs[0].detach().contiguous()
    if x.numel() < 3:
        return False
    order = torch.randperm(x.numel(), generator=generator, device=x.device)
    touched = x.clone()
    touched.view(-1)[x.numel() // 2] += 1.0
    shuffled = x.view(-1)[order].view(x.shape)
    try:
        results = [
            run(spec.reference, replace(spec, grads=()), replace(start, inputs=(value,)))
            for value in (x, shuffled, touched)
        ]
    except Exception:  # a reference that refuses shuffled values is no elementwise formula
        return False
    named = [{} if isinstance(r, str) else r.outputs for r in results]
    if not named[0] or any(t.shape != x.shape for r in named for t in r.values()):
        return False
    for name, plain in named[0].items():
        flat = plain.reshape(-1)
        if not torch.equal(flat[order], named[1][name].reshape(-1)):
            return False
        moved = (flat != named[2][name].reshape(-1)).nonzero().reshape(-1).tolist()
        if moved not in ([], [x.numel() // 2]):
            return False
    return any(not torch.equal(named[0][n], named[2][n]) for n in named[0])


def zero_signs(reference: torch.Tensor, target: torch.Tensor) -> int:
    """How many zeros of the target have another sign than the reference's zeros in their place."""
    both = (reference == 0) & (target == 0)
    return int((both & (torch.signbit(reference) != torch.signbit(target))).sum())
