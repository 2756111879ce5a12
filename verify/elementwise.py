"""Two tensors, element by element: largest differences, ULP, where, and how they are spread. Needs torch."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import torch

from bridge.verify.diff_document import TensorDiff, WorstPair
from bridge.verify.ulp import histogram, ulp_of
from bridge.verify.verdict import ErrorMap, Histogram

MAP_SIZE = 48  #: blocks per side of an error map, at most
WORST = 8
HAVE_ULP = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def compare_tensors(a: torch.Tensor, b: torch.Tensor, known: TensorDiff) -> TensorDiff:
    """Fill in what only the elements tell. Shapes must be equal; otherwise `known` comes back with a note."""
    if a.shape != b.shape:
        return msgspec.structs.replace(known, note=f"shapes {tuple(a.shape)} and {tuple(b.shape)} differ")
    if a.numel() == 0 or a.is_complex():
        return known
    coarse = b.dtype if a.dtype.is_floating_point and not b.dtype.is_floating_point else a.dtype
    if b.dtype.is_floating_point and a.dtype.is_floating_point:
        coarse = max(a.dtype, b.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    left, right = a.detach().double().reshape(-1), b.detach().double().reshape(-1)
    same = (left == right) | (left.isnan() & right.isnan())
    signed = torch.where(same, 0.0, right - left)
    finite = signed.isfinite()
    size = signed.abs()
    scale = _largest(left[left.isfinite()])
    most = _largest(size[finite])
    ulp = torch.zeros_like(signed)
    if coarse in HAVE_ULP:
        spacing = ulp_of(torch.where(left.isfinite(), left, 0.0), coarse).double()
        ulp = torch.where(finite, signed / spacing, math.inf)
    relative = torch.where(same, 0.0, size / left.abs())
    noise = known.noise if known.noise else 0.0
    limit = noise * scale
    spread = histogram(left[finite], left[finite], right[finite], coarse) if coarse in HAVE_ULP else None
    worst = torch.topk(torch.where(finite, size, math.inf), min(WORST, size.numel())).indices
    return msgspec.structs.replace(
        known,
        elementwise=True,
        equal=bool(same.all()),
        difference=_finite(most / scale if scale > 0 else (0.0 if most == 0 else math.inf)),
        max_abs=_finite(_largest(size[finite])),
        max_rel=_finite(_largest(relative[finite & (left != 0)])),
        ulp=_finite(_largest(ulp[finite].abs())),
        bias_ulp=_finite(float(ulp[finite].mean())) if bool(finite.any()) else None,
        different=int((~same).sum()),
        histogram=spread
        and Histogram(edges=spread.edges, reference=(0,) * len(spread.reference), target=spread.target),
        error_map=_error_map(torch.where(finite, size, math.inf).reshape(a.shape), limit or scale or 1.0),
        worst=tuple(_worst(int(at), left, right, ulp, tuple(a.shape)) for at in worst if size[at] > 0),
        note=known.note,
    )


def _worst(
    at: int, left: torch.Tensor, right: torch.Tensor, ulp: torch.Tensor, shape: tuple[int, ...]
) -> WorstPair:
    index, rest = [], at
    for size in reversed(shape):
        index.append(rest % size)
        rest //= size
    return WorstPair(
        index=tuple(reversed(index)),
        a=_finite(float(left[at])),
        b=_finite(float(right[at])),
        ulp=_finite(abs(float(ulp[at]))),
    )


def _error_map(size: torch.Tensor, limit: float) -> ErrorMap:
    """Largest difference per block of the tensor seen as [rows, cols], over the limit."""
    flat = size.reshape(-1, size.shape[-1]) if size.dim() else size.reshape(1, 1)
    rows, cols = flat.shape
    row_step, col_step = max(1, math.ceil(rows / MAP_SIZE)), max(1, math.ceil(cols / MAP_SIZE))
    high, wide = math.ceil(rows / row_step), math.ceil(cols / col_step)
    padded = torch.zeros(high * row_step, wide * col_step, dtype=torch.float64)
    padded[:rows, :cols] = flat
    blocks = padded.reshape(high, row_step, wide, col_step).amax(dim=(1, 3)) / limit
    values = tuple(tuple(_short(value) for value in row) for row in blocks.tolist())
    return ErrorMap(rows=rows, cols=cols, row_step=row_step, col_step=col_step, values=values)


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _largest(values: torch.Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def _finite(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None
