"""Which axis of a call's tensors runs over rows that do not depend on each other, found out on a few rows.

Golden of a few rows taken alone must equal golden of the same rows among their neighbours, and what has no
rows (a weight's gradient) must be the sum of what its parts give. Where that holds, golden and the noise
envelope of a large case are made a block of rows at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from bridge.errors import SpecError
from bridge.verify.bits import same_bits
from bridge.verify.case import Case
from bridge.verify.execute import copy_with_layout, run
from bridge.verify.golden import run_golden
from bridge.verify.golden_check import disagree
from bridge.verify.spec import KernelSpec

#: Rows tried together; they are cut into parts of these lengths, no two neighbours alike, so that neither
#: pairs nor aligned groups of rows go unnoticed.
_PARTS = (2, 3, 1)
#: How many these are.
FEW = sum(_PARTS)
#: Fewer rows than this cannot be cut into blocks that are small beside the whole.
FEWEST = 48
#: Assignments of axes that are tried on one axis of the largest input.
_MOST_TRIES = 16

Axis = int | None


class NotApartError(Exception):
    """The rows of a case depend on each other, or it cannot be told that they do not; carries why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The axis of each tensor along which the rows lie; None where a tensor belongs to all rows.

    extent: rows in all.
    inputs, upstream: one axis per input and per upstream gradient.
    results: by the names of the verdict table.
    likes: what the reference gives for the first FEW rows; None for an input without a gradient.
    """

    extent: int
    inputs: tuple[Axis, ...]
    upstream: tuple[Axis, ...]
    results: Mapping[str, Axis]
    likes: Mapping[str, torch.Tensor | None]

    def like(self, name: str) -> torch.Tensor | None:
        """Shape, dtype and device of a result of all rows, in the memory of one element."""
        few = self.likes[name]
        if few is None:
            return None
        axis = self.results[name]
        shape = [self.extent if a == axis else size for a, size in enumerate(few.shape)]
        return torch.empty((), dtype=few.dtype, device=few.device).expand(shape)

    def block(self, case: Case, start: int, stop: int) -> Case:
        """The case of the rows from `start` to `stop`, in memory of its own."""
        return replace(
            case,
            inputs=tuple(cut(t, a, start, stop) for t, a in zip(case.inputs, self.inputs, strict=True)),
            grad_outputs=tuple(
                cut(t, a, start, stop) for t, a in zip(case.grad_outputs, self.upstream, strict=False)
            ),
            recorded=None,
        )

    def pick(self, case: Case, rows: Sequence[int]) -> Case:
        """The case of these rows."""

        def picked(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
            if axis is None:
                return tensor
            return tensor.index_select(axis, torch.tensor(rows, device=tensor.device))

        return replace(
            case,
            inputs=tuple(picked(t, a) for t, a in zip(case.inputs, self.inputs, strict=True)),
            grad_outputs=tuple(picked(t, a) for t, a in zip(case.grad_outputs, self.upstream, strict=False)),
            recorded=None,
        )


def cut(tensor: torch.Tensor, axis: Axis, start: int, stop: int) -> torch.Tensor:
    """A copy of those rows; the tensor itself where it has none."""
    return tensor if axis is None else tensor.narrow(axis, start, stop - start).clone()


def rows_apart(spec: KernelSpec, case: Case) -> Rows:
    """The axis that the case may be cut along.

    Raises:
        NotApartError: there is none.
    """
    largest = max(range(len(case.inputs)), key=lambda i: case.inputs[i].numel())
    shape = case.inputs[largest].shape
    why = f"no axis of {tuple(shape)} but the last has {FEWEST} or more entries"
    for axis in range(max(1, len(shape) - 1)):
        if shape[axis] < FEWEST:
            continue
        why = "its rows depend on each other"
        for inputs in _assignments(case, largest, axis):
            found = _holds(spec, case, inputs, shape[axis])
            if found is not None and spec.golden is not None:
                # Rows of the reference must be apart as well, which golden's own formula does not show.
                of_reference = _holds(replace(spec, golden=None), case, inputs, shape[axis])
                if of_reference is None or of_reference.results != found.results:
                    continue
            if found is not None:
                return found
    raise NotApartError(why)


def _assignments(case: Case, largest: int, axis: int) -> Iterator[tuple[Axis, ...]]:
    """Axes that the rows may lie along in each input, likelier ones first."""
    extent = case.inputs[largest].shape[axis]
    choices: list[list[Axis]] = []
    for place, tensor in enumerate(case.inputs):
        alike: list[Axis] = [a for a, size in enumerate(tensor.shape) if size == extent]
        alike.sort(key=lambda a: abs((a or 0) - axis))
        if place == largest:
            choices.append([axis])
        elif tensor.shape == case.inputs[largest].shape:
            choices.append([axis])
        else:
            choices.append([*alike, None])
    yield from itertools.islice(itertools.product(*choices), _MOST_TRIES)


def _holds(spec: KernelSpec, case: Case, inputs: tuple[Axis, ...], extent: int) -> Rows | None:
    """The axes of all tensors, if rows at the beginning, in the middle and at the end are their own."""
    rows = _outputs_of(spec, case, inputs, extent)
    if rows is None:
        return None
    for start in (0, (extent - FEW) // 2, extent - FEW):
        edges = list(itertools.accumulate(_PARTS, initial=start))
        try:
            whole = run_golden(spec, rows.block(case, edges[0], edges[-1])).named()
            parts = [run_golden(spec, rows.block(case, a, b)).named() for a, b in itertools.pairwise(edges)]
            if start == 0:
                rows = replace(rows, likes=_eager(spec, rows.block(case, edges[0], edges[-1])))
        except SpecError:
            return None  # the formula does not take rows in any number
        found = _results_of(whole, parts, rows.likes)
        if found is None or any(found.get(name) != axis for name, axis in rows.results.items()):
            return None
        if start == 0:
            rows = replace(rows, results=found)
    return rows


def _eager(spec: KernelSpec, case: Case) -> dict[str, torch.Tensor | None]:
    """What the reference gives.

    Raises:
        SpecError: it raises, returns something else than tensors, or writes to what it is given.
    """
    inputs, upstream = (
        tuple(copy_with_layout(t) for t in given) for given in (case.inputs, case.grad_outputs)
    )
    try:
        result = run(spec.reference, spec, case, inputs=inputs, grad_outputs=upstream)
    except Exception as error:
        raise SpecError(f"the reference raised {type(error).__name__}: {error}") from error
    if isinstance(result, str):
        raise SpecError(f"the reference {result}")
    given = zip((*case.inputs, *case.grad_outputs), (*inputs, *upstream), strict=True)
    if not all(same_bits(before, after) for before, after in given):
        raise SpecError("the reference must not write to its inputs")
    return result.named()


def _outputs_of(spec: KernelSpec, case: Case, inputs: tuple[Axis, ...], extent: int) -> Rows | None:
    """Axes of the outputs, and so of their upstream gradients, from how their shapes follow the rows."""
    forward = replace(spec, grads=())
    plain = Rows(extent=extent, inputs=inputs, upstream=(), results={}, likes={})
    few = _PARTS[0]
    without = replace(case, grad_outputs=())
    try:
        small = run_golden(forward, plain.block(without, 0, few)).outputs
        large = run_golden(forward, plain.block(without, 0, FEW)).outputs
    except SpecError:
        return None
    axes: dict[str, Axis] = {}
    for name in spec.outputs:
        axis = axis_of(small[name].shape, large[name].shape)
        if axis == -1 or (axis is not None and small[name].shape[axis] != few):
            return None
        axes[name] = axis
    return replace(plain, upstream=tuple(axes[name] for name in spec.outputs), results=axes)


def axis_of(small: torch.Size, large: torch.Size) -> Axis:
    """The axis whose size follows the number of rows; None: no axis does; -1: it is not one alone."""
    if len(small) != len(large):
        return -1
    moved = [axis for axis, (a, b) in enumerate(zip(small, large, strict=True)) if a != b]
    return None if not moved else (moved[0] if len(moved) == 1 else -1)


def _results_of(
    whole: Mapping[str, torch.Tensor | None],
    parts: list[dict[str, torch.Tensor | None]],
    eager: Mapping[str, torch.Tensor | None],
) -> dict[str, Axis] | None:
    """The axis of every result, if the parts put together (or added up) give the whole."""
    found: dict[str, Axis] = {}
    for name, all_of_it in whole.items():
        pieces = [part[name] for part in parts]
        like = eager.get(name)
        if all_of_it is None or like is None:
            if any(piece is not None for piece in pieces) or all_of_it is not like:
                return None
            found[name] = None
            continue
        if like.shape != all_of_it.shape:
            return None
        known = [piece for piece in pieces if piece is not None]
        axis = axis_of(known[0].shape, all_of_it.shape) if len(known) == len(pieces) else -1
        if axis == -1:
            return None
        if axis is not None:
            if any(piece.shape[axis] != length for piece, length in zip(known, _PARTS, strict=True)):
                return None
            together = torch.cat(known, axis)
        else:
            together = torch.stack(known).sum(0)
        if not _agree(together, all_of_it, like.dtype):
            return None
        found[name] = axis
    return found


def _agree(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    same = (one == other) | ((one != one) & (other != other))
    if one.is_floating_point() and dtype.is_floating_point:
        same |= torch.isfinite(one) & torch.isfinite(other) & ~disagree(one, other, dtype)
    return bool(same.all())
