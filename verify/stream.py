"""One tensor of a large case, judged as its blocks of rows come: the sums and maxima of `compare`, running.

Nothing of the tensor's own size is made in FP64. The verdict is what `judge_tensor` gives of the whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec
import torch

from bridge.verify.companions import Compared, budget_companion
from bridge.verify.compare import settle_finite, weigh_tensor
from bridge.verify.gate import gate_of, largest_errors
from bridge.verify.local import (
    as_matrix,
    cell_of,
    line_companion,
    line_ratio,
    map_of,
    map_steps,
    ranked_elements,
    tile_companion,
)
from bridge.verify.runningstats import Statistics
from bridge.verify.structure import Mismatch
from bridge.verify.ulp import histogram, round_to
from bridge.verify.verdict import Companion, Constants, Histogram, TensorVerdict, WorstElement

#: What `largest_errors` gives.
Errors = tuple[float, float, float, float]
#: Share of the elements whose three draws may all be so small that a correct result is over six of them.
_LUCKY = 0.01
#: Elements that are shown of a tensor.
_WORST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is asked of one tensor; as the arguments of `judge_tensor`.

    axis: along which the blocks follow each other.
    """

    name: str
    case: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    axis: int
    constants: Constants
    nonfinite_inputs: bool = False
    demand_inf: bool = False
    fault: str | None = None
    tiles: tuple[int, ...] = ()

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns: the last axis is the columns."""
        cols = self.shape[-1]
        return math.prod(self.shape[:-1]), cols


@dataclass(slots=True)
class _Worst:
    """The largest of what came so far, where, and how many were over 1."""

    value: float = 0.0
    place: tuple[int, ...] = ()
    over: int = 0
    any: bool = False

    def see(self, value: float, place: tuple[int, ...], over: int) -> None:
        self.over += over
        if not self.any or value > self.value or (value != value and self.value == self.value):
            self.value, self.place, self.any = value, place, True


class Stream:
    """The running judgement of one tensor."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        rows, cols = asked.matrix
        self._rows, self._cols = rows, cols
        self._errors = (0.0, 0.0, 0.0, 0.0)
        self._mismatch: Mismatch | None = None
        self._budget = _Worst()
        self._row = _Worst()
        self._column = self._table(4, cols) if rows > 1 and cols > 1 else None
        self._cell = cell_of(rows, cols, asked.tiles)
        self._tile = None
        if self._cell is not None:
            self._tile = self._table(4, -(-rows // self._cell[0]), -(-cols // self._cell[1]))
        row_step, col_step = self._steps = map_steps(rows, cols)
        self._map = self._table(-(-rows // row_step), -(-cols // col_step)) - 1.0
        self._histogram: Histogram | None = None
        self._worst: list[tuple[float, WorstElement]] = []
        self.over: set[int] = set()  #: rows, along the axis of the blocks, with an element over its budget
        self._statistics = Statistics(asked.dtype, rows=rows, cols=cols, ndim=len(asked.shape))

    def _table(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self._asked.device)

    def add(self, start: int, data: Compared, free: torch.Tensor | None = None) -> None:
        """Take the block that begins at row `start`.

        Args:
            data: golden, reference and target of the block in FP64.
            free: elements at which more than one answer is legal.
        """
        asked = self._asked
        found = settle_finite(data, asked.nonfinite_inputs, free, asked.demand_inf)
        if found is not None:
            self._mismatch = _first(self._mismatch, found, self._placed(found.where, start))
        place = _Place(asked, start, data.golden.shape)
        errors = largest_errors(data.golden, data.reference, data.target, dtype=data.dtype, keep=data.keep)
        self._errors = _larger(self._errors, errors)
        budget = data.budget()
        self._see_budget(data, budget, start)
        sizes = [
            _kept(values, data)
            for values in (
                round_to(data.golden, data.dtype) - data.golden,
                data.reference - data.golden,
                budget,
                data.target - data.golden,
            )
        ]
        if self._rows > 1:
            self._see_rows(torch.stack([size.amax(1) for size in sizes]), place)
        if self._column is not None:
            torch.maximum(self._column, torch.stack([size.amax(0) for size in sizes]), out=self._column)
        if self._tile is not None and self._cell is not None:
            sizes[2] = _kept(data.budget(self._cell[1]), data)
            for table, size in zip(self._tile, sizes, strict=True):
                place.merge(table, size, self._cell)
        place.merge(self._map, _known(data), self._steps)
        self._see_worst(data, start)
        counts = histogram(*data.compared(), data.dtype)
        self._histogram = counts if self._histogram is None else _sum(self._histogram, counts)
        self._statistics.add(data)

    def _placed(self, index: tuple[int, ...], start: int) -> tuple[int, ...]:
        axis = self._asked.axis
        return tuple(i + start if a == axis else i for a, i in enumerate(index))

    def _see_budget(self, data: Compared, budget: torch.Tensor, start: int) -> None:
        ratio = (data.target - data.golden).abs_().div_(budget).masked_fill_(~data.keep, 0.0)
        at = int(ratio.argmax())
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), ratio.shape))
        over = ratio > 1
        count = int(over.sum())
        self._budget.see(float(ratio.reshape(-1)[at]), self._placed(index, start), count)
        if count:
            other = [axis for axis in range(over.ndim) if axis != self._asked.axis]
            rows = over.any(dim=other) if other else over
            self.over.update(start + row for row in rows.nonzero().flatten().tolist())

    def _see_rows(self, sizes: torch.Tensor, place: _Place) -> None:
        ratio = line_ratio(sizes, self._asked.constants)
        line = int(ratio.argmax())
        self._row.see(float(ratio[line]), (int(place.rows[line]),), int((ratio > 1).sum()))

    def _see_worst(self, data: Compared, start: int) -> None:
        ranked = [
            (key, msgspec.structs.replace(element, index=self._placed(element.index, start)))
            for key, element in ranked_elements(data, count=_WORST)
        ]
        self._worst = sorted([*self._worst, *ranked], key=lambda pair: -pair[0])[:_WORST]

    @property
    def lucky(self) -> bool:
        """Whether so few elements are over their budget that luck in their noise draws may be why."""
        return self._budget.over <= _LUCKY * math.prod(self._asked.shape)

    def verdict(self) -> TensorVerdict:
        """What all blocks come to."""
        asked = self._asked
        total = math.prod(asked.shape)
        gate = gate_of(self._errors, asked.constants)
        structure = None if self._mismatch is None else self._mismatch.told(total)
        found = weigh_tensor(
            asked.name,
            asked.case,
            gate,
            self._companions(total),
            dtype=asked.dtype,
            shape=asked.shape,
            structure=structure,
            fault=asked.fault,
        )
        return msgspec.structs.replace(
            found,
            histogram=self._histogram,
            error_map=map_of(self._map, self._rows, self._cols, gate.threshold),
            worst=tuple(element for _, element in self._worst),
        )

    def _companions(self, total: int) -> dict[str, Companion]:
        worst, constants = self._budget, self._asked.constants
        found = {"noise budget": budget_companion(worst.value, worst.over, total, worst.place)}
        if self._row.any:
            row = self._row
            found["row gate"] = line_companion(row.value, row.place[0], row.over, self._rows, "row")
        if self._column is not None:
            ratio = line_ratio(self._column, constants)
            line = int(ratio.argmax())
            over = int((ratio > 1).sum())
            found["column gate"] = line_companion(float(ratio[line]), line, over, self._cols, "column")
        if self._tile is not None and self._cell is not None:
            found["tile gate"] = tile_companion(line_ratio(self._tile, constants), self._cell)
        return found | self._statistics.companions()


class _Place:
    """Where the elements of a block lie in the [rows, cols] matrix of the whole tensor."""

    def __init__(self, asked: Asked, start: int, shape: torch.Size) -> None:
        device = asked.device
        self._flat = len(asked.shape) == 1
        if self._flat:
            self.rows = torch.zeros(1, dtype=torch.int64, device=device)
            self.columns = torch.arange(start, start + shape[0], device=device)
            return
        self.rows = torch.zeros((1,) * (len(shape) - 1), dtype=torch.int64, device=device)
        step = 1
        for axis in range(len(shape) - 2, -1, -1):
            first = start if axis == asked.axis else 0
            along = torch.arange(first, first + shape[axis], device=device) * step
            self.rows = self.rows + along.reshape([-1 if a == axis else 1 for a in range(len(shape) - 1)])
            step *= asked.shape[axis]
        self.rows = self.rows.reshape(-1)

    def merge(self, table: torch.Tensor, values: torch.Tensor, cell: tuple[int, int]) -> None:
        """Put the largest of each cell into `table`."""
        high, wide = cell
        if self._flat:
            table[0].scatter_reduce_(0, self.columns // wide, values.reshape(-1), "amax")
            return
        across = table.shape[1]
        spare = across * wide - values.shape[1]
        padded = torch.nn.functional.pad(values, (0, spare), value=-1.0)
        most = padded.reshape(values.shape[0], across, wide).amax(2)
        table.scatter_reduce_(0, (self.rows // high)[:, None].expand_as(most), most, "amax")


def _kept(values: torch.Tensor, data: Compared) -> torch.Tensor:
    return as_matrix(values.abs().masked_fill_(~data.keep, 0.0))


def _known(data: Compared) -> torch.Tensor:
    errors = as_matrix((data.target - data.golden).abs_().masked_fill_(~data.keep, -1.0))
    return torch.nan_to_num(errors, nan=-1.0, posinf=float("inf"))


def _larger(one: Errors, other: Errors) -> Errors:
    a, b, c, d = (y if y != y or y > x else x for x, y in zip(one, other, strict=True))
    return a, b, c, d


def _first(one: Mismatch | None, other: Mismatch, where: tuple[int, ...]) -> Mismatch:
    """Both together; the earlier place is the one that is told."""
    if one is None:
        return Mismatch(count=other.count, got=other.got, want=other.want, where=where)
    early = where < one.where
    return Mismatch(
        count=one.count + other.count,
        got=other.got if early else one.got,
        want=other.want if early else one.want,
        where=where if early else one.where,
    )


def _sum(one: Histogram, other: Histogram) -> Histogram:
    return Histogram(
        edges=one.edges,
        reference=tuple(a + b for a, b in zip(one.reference, other.reference, strict=True)),
        target=tuple(a + b for a, b in zip(one.target, other.target, strict=True)),
    )
