"""Units in the last place: the spacing of a dtype's values, and error histograms in that unit."""

from __future__ import annotations

import torch

from bridge.verify.verdict import Histogram

#: significand bits (the hidden one included) and the exponent of the smallest normal value
_FORMATS: dict[torch.dtype, tuple[int, int]] = {
    torch.float64: (53, -1022),
    torch.float32: (24, -126),
    torch.bfloat16: (8, -126),
    torch.float16: (11, -14),
    torch.float8_e4m3fn: (4, -6),
    torch.float8_e5m2: (3, -14),
}

#: Bin edges, in ULP; 0.5 is the most that one correct rounding can be off.
EDGES = (
    -8.0,
    -4.0,
    -2.0,
    -1.5,
    -1.0,
    -0.75,
    -0.5,
    -0.25,
    -0.05,
    0.05,
    0.25,
    0.5,
    0.75,
    1.0,
    1.5,
    2.0,
    4.0,
    8.0,
)


def is_low(dtype: torch.dtype) -> bool:
    """Whether `dtype` is a floating type of 16 bits or fewer."""
    return dtype.is_floating_point and _FORMATS.get(dtype, (53, 0))[0] <= 11


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half a ULP at 1: the relative error of one correct rounding."""
    return float(2.0 ** -_FORMATS[dtype][0])


def smallest_normal(dtype: torch.dtype) -> float:
    """Smallest positive normal value; hardware may flush fp32 results below it to zero."""
    return float(2.0 ** _FORMATS[dtype][1])


def ulp_of(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Spacing of `dtype` at |values|, in FP64 and in the shape of `values` (FP64, finite or not)."""
    bits, least = _FORMATS[dtype]
    _, exponent = torch.frexp(values)
    exponent = torch.where(values == 0, least + 1, exponent).clamp_min(least + 1)
    return torch.ldexp(torch.ones_like(values), exponent - bits)


def round_to(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """FP64 `values` rounded once to `dtype` and widened again."""
    return values.to(dtype).to(torch.float64)


def histogram(
    golden: torch.Tensor, reference: torch.Tensor, target: torch.Tensor, dtype: torch.dtype
) -> Histogram:
    """Signed errors of both in ULP of `dtype`; the outermost bins collect everything beyond."""
    unit = ulp_of(golden, dtype)
    return Histogram(
        edges=EDGES,
        reference=_counts((reference - golden).div_(unit)),
        target=_counts((target - golden).div_(unit)),
    )


def _counts(errors: torch.Tensor) -> tuple[int, ...]:
    finite = errors if bool(torch.isfinite(errors).all()) else errors[torch.isfinite(errors)]
    finite = finite.reshape(-1).clamp(EDGES[0], EDGES[-1])
    inner = torch.tensor(EDGES[1:-1], dtype=torch.float64, device=errors.device)
    bins = torch.bucketize(finite, inner, right=False)
    return tuple(int(n) for n in torch.bincount(bins, minlength=len(EDGES) - 1).tolist())
