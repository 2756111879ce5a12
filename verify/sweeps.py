"""Adversarial values: what a normal draw never shows, made from a normal draw.

Integer inputs are indices and pass through untouched. `data` inputs are the floating ones of the
highest rank (activations, logits, operands); the others are `parameters` (weights, biases).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Change = Callable[[torch.Tensor, torch.Generator], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """One family of values. `kinds` limits it to kernels where it means something; () is all."""

    name: str
    change: Change
    on: str = "data"  #: "data" | "parameters" | "grad_output"
    kinds: tuple[str, ...] = ()
    least_rank: int = 0


def _scaled(factor: float) -> Change:
    return lambda x, _: x * factor


def _shifted(offset: float) -> Change:
    return lambda x, _: x + offset


def _rows(x: torch.Tensor) -> int:
    return int(x.shape[0]) if x.ndim > 1 else 1


def _column(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """One value per leading index, shaped to multiply `x`."""
    return values.view(-1, *([1] * (x.ndim - 1))) if x.ndim > 1 else values


def _zero_rows(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    out = x.clone()
    out[:: max(1, _rows(x) // 2)] = 0
    return out


def _constant_rows(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return x[..., :1].expand(x.shape) + torch.zeros_like(x)


def _near_constant(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return x[..., :1] + 1e-2 * x


def _outlier(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    out = x.clone()
    out[..., x.shape[-1] // 3] *= 300.0
    return out


def _uneven_rows(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return x * _column(torch.logspace(-3, 2, _rows(x), device=x.device), x)


def _uneven_columns(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return x * torch.logspace(-3, 1, x.shape[-1], device=x.device)


def _few_values(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.round(x)


def _nan_row(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    out = x.clone()
    out[_rows(x) // 2, ...].view(-1)[0] = float("nan")
    return out


def _masked_half(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    out = x.clone()
    out[..., : x.shape[-1] // 2] = float("-inf")
    return out


def _masked_most(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    out = x.clone()
    out[..., : x.shape[-1] - 1] = float("-inf")
    return out


def _only_row(pick: Callable[[int], int]) -> Change:
    def change(x: torch.Tensor, _: torch.Generator) -> torch.Tensor:
        out = torch.zeros_like(x)
        row = pick(_rows(x))
        if x.ndim > 1:
            out[row] = x[row]
        else:
            out[-1] = x[-1]
        return out

    return change


_REDUCING = ("reduction", "matmul", "other")

SWEEPS: tuple[Sweep, ...] = (
    Sweep(name="x * 1e-4", change=_scaled(1e-4)),
    Sweep(name="x * 1e-2", change=_scaled(1e-2)),
    Sweep(name="x * 10", change=_scaled(10.0)),
    Sweep(name="x * 100", change=_scaled(100.0)),
    Sweep(name="x + 30", change=_shifted(30.0)),
    Sweep(name="x + 1000", change=_shifted(1000.0)),
    Sweep(name="x - 1000", change=_shifted(-1000.0)),
    Sweep(name="all negative", change=lambda x, _: -x.abs()),
    Sweep(name="all very negative", change=lambda x, _: -(1 + x.abs()) * 1000),
    Sweep(name="all positive", change=lambda x, _: x.abs()),
    Sweep(name="zero rows", change=_zero_rows),
    Sweep(name="all zero", change=_scaled(0.0)),
    Sweep(name="constant rows", change=_constant_rows),
    Sweep(name="nearly constant rows", change=_near_constant),
    Sweep(name="one outlier a row", change=_outlier),
    Sweep(name="rows of uneven size", change=_uneven_rows, least_rank=2),
    Sweep(name="columns of uneven size", change=_uneven_columns),
    Sweep(name="few distinct values", change=_few_values),
    Sweep(name="NaN in one row", change=_nan_row, least_rank=2),
    Sweep(name="first half of each row -Inf", change=_masked_half, kinds=("reduction",), least_rank=2),
    Sweep(name="all but the last of each row -Inf", change=_masked_most, kinds=("reduction",), least_rank=2),
    Sweep(name="parameters * 1e-2", change=_scaled(1e-2), on="parameters"),
    Sweep(name="parameters * 30", change=_scaled(30.0), on="parameters"),
    Sweep(name="grad_output in the first row only", change=_only_row(lambda n: 0), on="grad_output"),
    Sweep(name="grad_output in the last row only", change=_only_row(lambda n: n - 1), on="grad_output"),
    Sweep(name="grad_output all ones", change=lambda g, _: torch.ones_like(g), on="grad_output"),
    Sweep(name="grad_output * 1e-3", change=_scaled(1e-3), on="grad_output"),
    Sweep(name="grad_output all positive", change=lambda g, _: g.abs(), on="grad_output", kinds=_REDUCING),
)

#: Families whose inputs are not finite on purpose.
NONFINITE = frozenset({"NaN in one row", "first half of each row -Inf", "all but the last of each row -Inf"})


def applies(sweep: Sweep, kind: str) -> bool:
    """Whether `sweep` means something for a kernel of this kind."""
    return not sweep.kinds or kind in sweep.kinds


def roles(inputs: tuple[torch.Tensor, ...]) -> tuple[str, ...]:
    """ "data", "parameters" or "index" for each input."""
    ranks = [t.ndim for t in inputs if t.is_floating_point()]
    highest = max(ranks, default=0)
    return tuple(
        "index" if not t.is_floating_point() else ("data" if t.ndim == highest else "parameters")
        for t in inputs
    )


def changed(tensor: torch.Tensor, sweep: Sweep, generator: torch.Generator) -> torch.Tensor:
    """`tensor` with the sweep's values, in its own dtype; finite values stay finite."""
    if tensor.ndim < sweep.least_rank or not tensor.numel():
        return tensor
    # A scalar (a loss's upstream gradient) is a row of one.
    whole = tensor.to(torch.float32)
    wide = (
        sweep.change(whole.reshape(1), generator).reshape(())
        if not tensor.ndim
        else sweep.change(whole, generator)
    )
    limit = torch.finfo(tensor.dtype).max / 8
    wide = torch.where(torch.isfinite(wide), wide.clamp(-limit, limit), wide)
    return wide.to(tensor.dtype)
