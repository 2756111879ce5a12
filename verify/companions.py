"""Checks that stand beside the gate. Each may turn a PASS into a FAIL; each passes when value <= limit.

All of them are relative to golden *and* to the reference: cast points are part of what a kernel means,
so a rounding that the reference makes too is never held against the target.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from bridge.verify.envelope import Envelope
from bridge.verify.ulp import is_low, smallest_normal, ulp_of
from bridge.verify.verdict import Companion

#: Standard deviations of legal noise an element may be off. The envelope is itself about twice the
#: noise of correct rounding; legal FP32 orders stay below 3 of these, a 16-bit step is 1000 out.
NOISE_FACTOR = 6.0
#: ULP of the output that any element may be off on top: one faithful rounding for 16-bit outputs,
#: two for wider ones, whose hardware functions are allowed two.
FAITHFUL_LOW, FAITHFUL_WIDE = 1.0, 2.0
#: RMS error against the reference's. Another cast point costs 1.4, a truncating store 2.0.
RMS_LIMIT = 1.2
#: Mean signed error beyond the reference's, ULP, and standard errors: both must be exceeded.
BIAS_LIMIT, BIAS_Z = 0.04, 8.0
#: Mean square over rows (columns) of sum(d)^2 / sum(d^2), d = target - reference in ULP: 1 for
#: independent signs, the row's length when all its elements are off the same way.
COHERENCE_LIMIT = 8.0
#: Root mean square of d below which two results are the same but for single flipped roundings.
SAME = 0.08
#: RMS of legal noise, ULP, from which on the last rounding no longer shows in statistics.
DROWNED = 16.0
#: Fewer elements than this say nothing statistical.
FEWEST = 48


@dataclass(slots=True)
class Compared:
    """One tensor's FP64 values where all are finite, and the unit and noise at each element."""

    golden: torch.Tensor
    reference: torch.Tensor
    target: torch.Tensor
    keep: torch.Tensor
    dtype: torch.dtype
    envelope: Envelope | None
    elementwise: bool = False
    known: torch.Tensor | None = None  #: the budget by whole rows, once it was asked for
    #: noise of a row (of its part in a tile of this many columns) relative to golden, as is typical in the
    #: tensor that this is a block of; None: this is all of it
    typical: Mapping[int | None, float | None] | None = None

    def compared(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Golden, reference and target where all three can be compared."""
        if bool(self.keep.all()):
            return self.golden, self.reference, self.target
        return self.golden[self.keep], self.reference[self.keep], self.target[self.keep]

    def budget(self, tile: int | None = None) -> torch.Tensor:
        """Largest legal |target - golden| per element.

        Args:
            tile: columns that share their noise; None: whole rows do.
        """
        if tile is None and self.known is not None:
            return self.known
        unit = ulp_of(self.golden, self.dtype)
        faithful = FAITHFUL_LOW if is_low(self.dtype) else FAITHFUL_WIDE
        noise = self._noise()
        if not self.elementwise:
            noise = torch.maximum(noise, self._along_rows(noise, tile))
        floor = smallest_normal(self.dtype) if self.dtype in (torch.float32, torch.bfloat16) else 0.0
        budget = unit.mul_(faithful).add_(NOISE_FACTOR * noise).add_(floor)
        if tile is None:
            self.known = budget
        return budget

    def _noise(self) -> torch.Tensor:
        own = (self.reference - self.golden).abs()
        noise = self.envelope.rms if self.envelope is not None else own
        # Where the reference itself lands further out than its noise draws, it shows what is legal.
        return torch.maximum(noise, own / 2 if is_low(self.dtype) else own)

    def relative(self, tile: int | None = None) -> torch.Tensor:
        """Noise of each row (of its part in each tile) over golden there, if that is not 0."""
        rows, size = self._rows_and_size(self._noise(), tile)
        return (rows / size)[size > 0]

    def _rows_and_size(self, noise: torch.Tensor, tile: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        use = self.keep & torch.isfinite(noise)
        zeros = torch.zeros_like(noise)
        rows = _pooled(torch.where(use, noise, zeros), tile)
        return rows, _pooled(torch.where(use, self.golden, zeros), tile)

    def _along_rows(self, noise: torch.Tensor, tile: int | None) -> torch.Tensor:
        """Noise of each element's row (or its part in one tile), at least what is typical in this tensor.

        Elements of a row share their sums, and another legal formula spreads the same error over the row
        in another way: where this formula's noise crosses zero another one's need not. A row's few draws
        can all be lucky too, so rows are pooled by their noise relative to golden.
        """
        if noise.ndim == 0:
            return noise
        rows, size = self._rows_and_size(noise, tile)
        if self.typical is None:
            relative = (rows / size)[size > 0]
            usual = float(relative.median()) if relative.numel() else None
        else:
            usual = self.typical[tile]
        if usual is not None:
            rows = torch.maximum(rows, size * usual)
        if tile is not None:
            rows = rows.repeat_interleave(tile, -1)[..., : noise.shape[-1]]
        return rows.expand_as(noise)


def _pooled(values: torch.Tensor, tile: int | None) -> torch.Tensor:
    """Root mean square over the last axis, in blocks of `tile`: [..., 1] or [..., blocks]."""
    if tile is None:
        return values.square().mean(-1, keepdim=True).sqrt()
    length = values.shape[-1]
    blocks = -(-length // tile)
    padded = torch.nn.functional.pad(values.square(), (0, blocks * tile - length))
    counts = torch.full((blocks,), float(tile), dtype=values.dtype, device=values.device)
    counts[-1] = length - (blocks - 1) * tile
    cut = padded.reshape(*values.shape[:-1], blocks, tile)
    return torch.sqrt(cut.sum(-1) / counts)


def noise_budget(data: Compared) -> Companion:
    """Worst element's error over its legal budget."""
    ratio = (data.target - data.golden).abs_().div_(data.budget()).masked_fill_(~data.keep, 0.0)
    worst = int(ratio.argmax()) if ratio.numel() else 0
    value = float(ratio.reshape(-1)[worst]) if ratio.numel() else 0.0
    over = int((ratio > 1).sum())
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), ratio.shape)) if ratio.ndim else ()
    return budget_companion(value, over, ratio.numel(), where)


def budget_companion(value: float, over: int, total: int, where: tuple[int, ...]) -> Companion:
    """The noise budget from its worst element."""
    return Companion(
        value=value,
        limit=1.0,
        passed=value <= 1.0,
        detail=f"{over} of {total} elements over their budget, worst at {where}" if over else "",
        note="legal rounding noise of the reference's formula, any FP32 order, plus one rounding",
    )


def statistics(data: Compared) -> dict[str, Companion]:
    """RMS, bias and coherence; for 16-bit outputs only, since legal FP32 orders differ coherently."""
    if not is_low(data.dtype) or int(data.keep.sum()) < FEWEST:
        return {}
    unit = ulp_of(data.golden, data.dtype)
    errors_t = clipped((data.target - data.golden).div_(unit), data.keep)
    errors_r = clipped((data.reference - data.golden).div_(unit), data.keep)
    difference = errors_t - errors_r
    by_rows = difference.ndim > 1 or difference.numel() >= FEWEST
    by_columns = difference.ndim > 1 and difference.numel() > difference.shape[-1]
    legal = _Legal()
    for draw in data.envelope.draws if data.envelope is not None else ():
        # One after the other: all of them at full width would be most of a judgement's memory.
        wide = draw.to(torch.float64)
        errors = clipped(
            (torch.where(torch.isfinite(wide), wide, data.golden) - data.golden) / unit, data.keep
        )
        legal.rms = max(legal.rms, float(errors.square().mean().sqrt()))
        errors -= errors_r
        legal.shift = max(legal.shift, abs(float(errors.sum())))
        rows, columns = rows_and_columns(errors)
        legal.rows = max(legal.rows, _aligned(rows)[0] if by_rows else 0.0)
        legal.columns = max(legal.columns, _aligned(columns)[0] if by_columns else 0.0)
    if legal.rms > DROWNED:
        return {}  # the formula's noise, of which a few draws give no statistics, and not the last rounding
    count = int(data.keep.sum())
    found = {
        "rms ratio": _rms(errors_t, errors_r, legal.rms),
        "bias": _bias(difference, legal.shift / count, count),
    }
    rows, columns = rows_and_columns(difference)
    if by_rows:
        found["row coherence"] = _coherence(rows, legal.rows)
    if by_columns:
        found["column coherence"] = _coherence(columns, legal.columns)
    return found


@dataclass(slots=True)
class _Legal:
    """The largest that the draws of the noise envelope reach, of each statistic."""

    rms: float = 0.0
    shift: float = 0.0
    rows: float = 0.0
    columns: float = 0.0


def clipped(values: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Fresh `values`, clamped in place, 0 where nothing is compared."""
    return values.clamp_(-1e6, 1e6).masked_fill_(~keep, 0.0)


def rows_and_columns(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, cols] and its transpose: the last axis is the columns."""
    matrix = values.reshape(-1, values.shape[-1]) if values.ndim > 1 else values.reshape(1, -1)
    return matrix, matrix.t()


def _rms(target: torch.Tensor, reference: torch.Tensor, legal: float) -> Companion:
    own = float(reference.square().mean().sqrt())
    value = float(target.square().mean().sqrt())
    gained = target.square().sub_(reference.square())
    error = float(gained.std()) / math.sqrt(gained.numel()) if gained.numel() > 1 else 0.0
    return rms_companion(value, own, float(gained.mean()), error, legal)


def rms_companion(value: float, own: float, gained: float, error: float, legal: float) -> Companion:
    """RMS of the target's error against the reference's.

    Args:
        value, own: RMS of both, ULP.
        gained, error: mean of the difference of their squares, and its standard error.
        legal: the largest RMS of a noise draw.
    """
    limit = RMS_LIMIT * max(own, legal)
    z = gained / error if error > 0 else (0.0 if gained <= 0 else float("inf"))
    passed = value <= limit + 0.02 or z < 4.0
    floor = max(limit, 1e-12)
    return Companion(
        value=RMS_LIMIT * value / floor if not passed or value <= floor else RMS_LIMIT,
        limit=RMS_LIMIT,
        passed=passed,
        detail=f"{value:.3g} ULP, reference {own:.3g}, {min(z, 9e9):.1f} standard errors apart",
    )


def _bias(difference: torch.Tensor, legal: float, count: int) -> Companion:
    return bias_companion(float(difference.sum()), float(difference.square().sum().sqrt()), legal, count)


def bias_companion(total: float, norm: float, legal: float, count: int) -> Companion:
    """Mean signed error beyond the reference's.

    Args:
        total, norm: sum and root of the sum of squares of target - reference, ULP.
        legal: the largest mean of a noise draw.
        count: elements compared.
    """
    # Toward zero or away from it: the sign of the value would hide a truncation otherwise.
    shift = total / count
    spread = norm / count
    z = abs(shift) / spread if spread > 0 else 0.0
    value = max(0.0, abs(shift) - 2 * legal)
    passed = value <= BIAS_LIMIT or z < BIAS_Z
    return Companion(
        value=value if not passed else min(value, BIAS_LIMIT),
        limit=BIAS_LIMIT,
        passed=passed,
        detail=f"{shift:+.3g} ULP beyond the reference's, {z:.1f} standard errors",
    )


def _coherence(lines: torch.Tensor, legal: float) -> Companion:
    return coherence_companion(*_aligned(lines), legal)


def coherence_companion(value: float, effect: float, legal: float) -> Companion:
    """How far errors share their sign along lines; arguments as `_aligned` gives them."""
    limit = max(COHERENCE_LIMIT, 2.0 * legal)
    passed = value <= limit or effect <= SAME
    return Companion(
        value=value if not passed else min(value, limit),
        limit=limit,
        passed=passed,
        detail=f"differences from the reference of {effect:.2g} ULP share their sign along a line",
    )


def _aligned(lines: torch.Tensor) -> tuple[float, float]:
    """Mean of sum(d)^2 / sum(d^2) over lines with differences, and the RMS of d over all."""
    squares = lines.square().sum(dim=1)
    used = squares > 0
    effect = float(lines.square().mean().sqrt())
    if int(used.sum()) == 0:
        return 0.0, effect
    # Pooled, so that a line with one flipped element does not weigh as much as a full one.
    chi = lines.sum(dim=1)[used].square().sum() / squares[used].sum()
    return float(chi), effect
