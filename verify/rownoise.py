"""The noise envelope of a block of rows, such that the blocks together have the noise of the whole.

What belongs to one row gets its own noise. What belongs to all rows (a gain formed in low precision) must
get the same noise in every block, and a sum over rows the noise of the whole sum, not of its parts. Which is
which shows in how the shapes of all operations follow the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bridge.verify.apart import Axis, NotApartError
from bridge.verify.noise import Noisy, base_name, is_exact, tree_leaves
from bridge.verify.rounding import spread, squares_of
from bridge.verify.ulp import is_low, unit_roundoff

#: Operations that hand a partial sum on without reading more into it.
_CARRY = frozenset({"_to_copy", "clone", "copy", "add", "detach", "_unsafe_view"})
#: Operations that read a tensor's dtype and device only.
_MAKE = frozenset("new_empty new_empty_strided new_full new_ones new_zeros".split())


@dataclass(frozen=True, slots=True)
class Step:
    """One result of one operation: name and shape."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """Every step of the reference at two numbers of rows."""

    few: int
    more: int
    small: Sequence[Step]
    large: Sequence[Step]

    def __post_init__(self) -> None:
        if [s.name for s in self.small] != [s.name for s in self.large]:
            raise NotApartError("the reference takes other steps for other rows")

    def follows(self, place: int, step: Step, rows: int) -> bool:
        """Whether the shape of this step follows the number of rows.

        Raises:
            NotApartError: the step is not the one that it was.
        """
        if place >= len(self.small) or self.small[place].name != step.name:
            raise NotApartError("the reference takes other steps for other rows")
        small, large = self.small[place].shape, self.large[place].shape
        if len(small) != len(large) or len(small) != len(step.shape):
            raise NotApartError(f"the shape of {step.name} follows the rows in no simple way")
        for a, b, size in zip(small, large, step.shape, strict=True):
            if size * (self.more - self.few) != a * (self.more - self.few) + (b - a) * (rows - self.few):
                raise NotApartError(f"the shape of {step.name} follows the rows in no simple way")
        return small != large


@dataclass(slots=True, kw_only=True)
class PartialSum:
    """A block's part of a sum over rows: what the noise of the whole sum is made of, FP64.

    terms, squares, total: number of terms, sum of their squares, and theirs; the tensors lie as the sum does.
    """

    terms: int
    squares: torch.Tensor
    total: torch.Tensor
    roundoff: float

    def seen_as(self, tensor: torch.Tensor) -> PartialSum:
        """The same under a view of the sum."""
        place = (tensor.shape, tensor.stride(), tensor.storage_offset())
        return PartialSum(
            terms=self.terms,
            squares=self.squares.as_strided(*place),
            total=self.total.as_strided(*place),
            roundoff=self.roundoff,
        )

    def laid_out(self, like: torch.Tensor) -> PartialSum:
        """A copy that lies in memory as `like` does."""
        return PartialSum(
            terms=self.terms,
            squares=_as(self.squares, like),
            total=_as(self.total, like),
            roundoff=self.roundoff,
        )

    def add(self, other: PartialSum) -> None:
        self.terms += other.terms
        self.squares = self.squares + other.squares
        self.total = self.total + other.total

    def noise(self, generator: torch.Generator) -> torch.Tensor:
        """One draw of the error of the whole sum."""
        size = spread(self.terms, self.squares, self.total)
        drawn = torch.randn(size.shape, generator=generator, dtype=torch.float64, device=size.device)
        return self.roundoff * size * drawn


def _as(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(like.shape, like.stride(), dtype=torch.float64, device=like.device)
    return made.copy_(values)


class RowNoisy(Noisy):  # type: ignore[no-untyped-call]
    """Noise for one block of rows.

    Args:
        generator: of what belongs to single rows; goes on from block to block.
        shared: of what belongs to all rows; begins anew with every block.
        law: None while the steps are being learned.
        rows: of this block.
    """

    def __init__(
        self,
        generator: torch.Generator,
        shared: torch.Generator,
        *,
        stable: bool,
        law: Law | None = None,
        rows: int = 0,
    ) -> None:
        super().__init__(generator, stable=stable)
        self._shared = shared
        self._law, self._number = law, rows
        self.steps: list[Step] = []
        self._of_rows: dict[int, bool] = {}  #: storage address -> whether it belongs to single rows
        # Storage address -> a sum over rows (held, so that nothing else gets its memory) and what it is of.
        self._partial: dict[int, tuple[torch.Tensor, list[PartialSum]]] = {}
        self._now = True  #: what is being drawn for belongs to single rows
        self._reducing: str | None = None  #: the op under way that makes one result out of all rows
        self._found: list[PartialSum] = []  #: what it gave

    def given(self, tensors: Sequence[torch.Tensor], axes: Sequence[Axis]) -> None:
        """Say which of the block's own tensors have rows."""
        for tensor, axis in zip(tensors, axes, strict=False):
            self._of_rows[_address(tensor)] = axis is not None

    def partial_sums(self, result: torch.Tensor) -> list[PartialSum]:
        """The sums over rows that a result without rows consists of.

        Raises:
            NotApartError: it is none.
        """
        found = self._parts_of(result)
        if not found:
            raise NotApartError("a result of all rows is no plain sum over them")
        return found

    def _parts_of(self, tensor: torch.Tensor) -> list[PartialSum]:
        _, found = self._partial.get(_address(tensor), (None, ()))
        return [part.seen_as(tensor) for part in found]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Of what is drawn before any step of a composed op is taken.
        self._now = self._law is None or self._reads_rows(args)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _copied(self, out: Any, args: Any) -> None:
        super()._copied(out, args)
        if isinstance(out, torch.Tensor):
            self._of_rows[_address(out)] = self._reads_rows(args)

    def _reads_rows(self, args: Any) -> bool:
        read = (a for a in tree_leaves(args) if isinstance(a, torch.Tensor))
        return any(self._of_rows.get(_address(a), False) for a in read)

    def _noisy(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        if not isinstance(out, torch.Tensor) or self._law is None:
            if isinstance(out, torch.Tensor):
                self.steps.append(Step(base_name(func), tuple(out.shape)))
            return super()._noisy(func, args, kwargs, out)
        step = Step(base_name(func), tuple(out.shape))
        self._now = of_rows = self._law.follows(len(self.steps), step, self._number)
        self.steps.append(step)
        read = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        reads_rows = self._reads_rows(read) and step.name not in _MAKE
        parts = [part for a in read for part in self._parts_of(a)]
        self._reducing = step.name if reads_rows and not of_rows else None
        self._found.clear()
        if self._reducing is not None and is_exact(func):
            raise NotApartError(f"{step.name} makes one result out of all rows")
        result: torch.Tensor = super()._noisy(func, args, kwargs, out)
        if self._reducing is not None and not self._found:
            raise NotApartError(f"{step.name} makes one result out of all rows")
        self._reducing = None
        address = _address(result)
        carried = not of_rows and step.name in _CARRY and all(p.total.shape == result.shape for p in parts)
        if parts and not carried:
            raise NotApartError(f"{step.name} goes on with what all rows gave together")
        parts += self._found
        self._of_rows[address] = of_rows
        if parts:
            self._partial[address] = result, [part.laid_out(result) for part in parts]
        return result

    def _summing(self, func: Any, args: Any, kwargs: Any, value: torch.Tensor) -> torch.Tensor | None:
        if self._reducing is None:
            return super()._summing(func, args, kwargs, value)
        squares = squares_of(func, args, kwargs)
        if squares is None:
            raise NotApartError(f"{self._reducing} makes one result out of all rows")
        dtype = torch.float32 if is_low(args[0].dtype) else args[0].dtype
        terms, total_of_squares = squares
        self._found.append(
            PartialSum(terms=terms, squares=total_of_squares, total=value, roundoff=unit_roundoff(dtype))
        )
        return None

    def _jittered(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        self._now = self._of_rows.get(_address(value), False)
        moved: torch.Tensor = super()._jittered(value)
        if moved is not value:
            # New memory, where something else may have been before.
            self._of_rows[_address(moved)] = self._now
        return moved

    def _source(self) -> torch.Generator:
        return self._generator if self._now else self._shared


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
