"""RMS, bias and coherence of one tensor's errors from sums that blocks of rows add to; see `companions`."""

from __future__ import annotations

import math

import torch

from bridge.verify.companions import (
    DROWNED,
    FEWEST,
    Compared,
    bias_companion,
    clipped,
    coherence_companion,
    rms_companion,
    rows_and_columns,
)
from bridge.verify.ulp import is_low, ulp_of
from bridge.verify.verdict import Companion


class _Errors:
    """Sums over one kind of errors in ULP: of all, of each row and of each column.

    Args:
        one_row: the tensor is one row, of which every block is a part.
    """

    def __init__(self, cols: int, *, one_row: bool) -> None:
        self._one_row = one_row
        self.total = self.squares = 0.0
        self._aligned_rows = 0.0
        self._columns: torch.Tensor | None = None
        self._cols = cols

    def add(self, errors: torch.Tensor) -> None:
        matrix, _ = rows_and_columns(errors)
        squares = matrix.square()
        by_row = squares.sum(1)
        self.total += float(errors.sum())
        self.squares += float(by_row.sum())
        if self._one_row:
            return
        used = by_row > 0
        self._aligned_rows += float(matrix.sum(1)[used].square().sum())
        sums = torch.stack((matrix.sum(0), squares.sum(0)))
        self._columns = sums if self._columns is None else self._columns + sums

    def rms(self, count: int) -> float:
        return math.sqrt(self.squares / count)

    def rows(self) -> float:
        """Mean of sum(d)^2 / sum(d^2) over rows with differences."""
        aligned = self.total**2 if self._one_row else self._aligned_rows
        return aligned / self.squares if self.squares > 0 else 0.0

    def columns(self) -> float:
        """The same over columns."""
        if self._columns is None:
            return 0.0
        sums, squares = self._columns
        used = squares > 0
        whole = float(squares[used].sum())
        return float(sums[used].square().sum()) / whole if whole > 0 else 0.0


class Statistics:
    """The running sums of one tensor, [rows, cols] with `ndim` axes; nothing is kept for wide dtypes."""

    def __init__(self, dtype: torch.dtype, *, rows: int, cols: int, ndim: int) -> None:
        self._low = is_low(dtype)
        self._rows, self._cols, self._ndim = rows, cols, ndim
        self._count = self._kept = 0
        self._target, self._reference, self._difference = self._new(), self._new(), self._new()
        self._draws: list[tuple[_Errors, _Errors]] = []  #: each draw's errors, and less the reference's
        # Mean of the difference of the squares, and the sum of its squared deviations.
        self._gained = self._deviations = 0.0

    def _new(self) -> _Errors:
        return _Errors(self._cols, one_row=self._ndim == 1)

    def add(self, data: Compared) -> None:
        """Take a block."""
        if not self._low:
            return
        unit = ulp_of(data.golden, data.dtype)
        errors_t = clipped((data.target - data.golden).div_(unit), data.keep)
        errors_r = clipped((data.reference - data.golden).div_(unit), data.keep)
        self._target.add(errors_t)
        self._reference.add(errors_r)
        self._difference.add(errors_t - errors_r)
        self._add_gained(errors_t.square().sub_(errors_r.square()))
        self._kept += int(data.keep.sum())
        draws = data.envelope.draws if data.envelope is not None else []
        self._draws = self._draws or [(self._new(), self._new()) for _ in draws]
        for (plain, beyond), draw in zip(self._draws, draws, strict=True):
            wide = draw.to(torch.float64)
            errors = clipped(
                (torch.where(torch.isfinite(wide), wide, data.golden) - data.golden) / unit, data.keep
            )
            plain.add(errors)
            beyond.add(errors.sub_(errors_r))

    def _add_gained(self, gained: torch.Tensor) -> None:
        count, mean = gained.numel(), float(gained.mean())
        whole = self._count + count
        gap = mean - self._gained
        self._deviations += float((gained - mean).square().sum()) + gap**2 * self._count * count / whole
        self._gained += gap * count / whole
        self._count = whole

    def companions(self) -> dict[str, Companion]:
        """What `companions.statistics` finds of the whole."""
        if not self._low or self._kept < FEWEST:
            return {}
        count = self._count
        spread = math.sqrt(self._deviations / (count - 1)) if count > 1 else 0.0
        legal_rms = max((plain.rms(count) for plain, _ in self._draws), default=0.0)
        if legal_rms > DROWNED:
            return {}
        legal_shift = max((abs(beyond.total) for _, beyond in self._draws), default=0.0)
        found = {
            "rms ratio": rms_companion(
                self._target.rms(count),
                self._reference.rms(count),
                self._gained,
                spread / math.sqrt(count),
                legal_rms,
            ),
            "bias": bias_companion(
                self._difference.total,
                math.sqrt(self._difference.squares),
                legal_shift / self._kept,
                self._kept,
            ),
        }
        effect = self._difference.rms(count)
        if self._ndim > 1 or count >= FEWEST:
            legal = max((beyond.rows() for _, beyond in self._draws), default=0.0)
            found["row coherence"] = coherence_companion(self._difference.rows(), effect, legal)
        if self._ndim > 1 and count > self._cols:
            legal = max((beyond.columns() for _, beyond in self._draws), default=0.0)
            found["column coherence"] = coherence_companion(self._difference.columns(), effect, legal)
        return found
