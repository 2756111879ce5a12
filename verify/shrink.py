"""Delta debugging of one case: fewer rows, fewer columns, plainer values, while it fails the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from bridge.verify.case import Case

#: Says whether a smaller case still fails the same way.
Fails = Callable[[Case], bool]
#: Axes that shrink together: (number of the tensor, number of its axis).
Axes = tuple[tuple[int, int], ...]

#: Tensors above this many elements keep their values: single elements are not worth a run each there.
_FEW = 256


@dataclass(slots=True)
class Shrinker:
    """Counts its tries; `budget` bounds them."""

    fails: Fails
    budget: int = 300
    tries: int = 0

    def shrink(self, case: Case) -> Case:
        """The smallest case found that still fails; the given one when nothing smaller does."""
        smaller = True
        while smaller and self.tries < self.budget:
            before = _size(case)
            for axes in groups(case):
                case = self._along(case, axes)
            smaller = _size(case) < before
        return self._simplify(case)

    def _try(self, case: Case) -> bool:
        if self.tries >= self.budget:
            return False
        self.tries += 1
        return self.fails(case)

    def _along(self, case: Case, axes: Axes) -> Case:
        """Zeller's ddmin over the indices of one group of axes."""
        tensor, axis = axes[0]
        keep = list(range(_tensors(case)[tensor].shape[axis]))
        start = case
        parts = 2
        while len(keep) >= 2 and self.tries < self.budget:
            pieces = list(_pieces(keep, parts))
            rests = [[i for i in keep if i not in set(piece)] for piece in pieces] if parts > 2 else []
            for kept in [*pieces, *rests]:
                candidate = select(start, axes, kept)
                if candidate is not None and self._try(candidate):
                    case, keep = candidate, kept
                    parts = 2 if kept in pieces else max(parts - 1, 2)
                    break
            else:
                if parts >= len(keep):
                    break
                parts = min(2 * parts, len(keep))
        return case

    def _simplify(self, case: Case) -> Case:
        """Whole tensors of plain values where those do, else single elements set to zero."""
        for number, tensor in enumerate(_tensors(case)):
            if not tensor.is_floating_point():
                continue
            for plain in (torch.ones_like(tensor), torch.sign(tensor), _powers(tensor)):
                candidate = None if torch.equal(plain, tensor) else _put(case, number, plain)
                if candidate is not None and self._try(candidate):
                    case = candidate
                    break
            else:
                case = self._zero_out(case, number)
        return case

    def _zero_out(self, case: Case, number: int) -> Case:
        count = _tensors(case)[number].numel()
        if count > _FEW:
            return case
        size = max(count // 2, 1)
        while size >= 1:
            for start in range(0, count, size):
                tensor = _tensors(case)[number]
                flat = tensor.reshape(-1).clone()
                if not bool(flat[start : start + size].any()):
                    continue
                flat[start : start + size] = 0
                candidate = _put(case, number, flat.reshape(tensor.shape))
                if candidate is not None and self._try(candidate):
                    case = candidate
            size //= 2
        return case


def groups(case: Case) -> Iterator[Axes]:
    """Axes that may belong together, likeliest first: by place in the largest input, then by equal size."""
    tensors = _tensors(case)
    main = max(case.inputs, key=lambda tensor: (tensor.dim(), tensor.numel()))
    seen: set[Axes] = set()

    def fresh(axes: Sequence[tuple[int, int]]) -> Iterator[Axes]:
        found = tuple(axes)
        if found and found not in seen:
            seen.add(found)
            yield found

    for place in range(main.dim()):
        last = place == main.dim() - 1
        aligned = []
        for number, tensor in enumerate(tensors):
            # Leading axes line up from the front, the last one from the back.
            axis = tensor.dim() - 1 if last else place
            inside = 0 <= axis < tensor.dim() and (
                last or axis < tensor.dim() - 1 or tensor.dim() < main.dim()
            )
            if inside and 1 < tensor.shape[axis] == main.shape[place]:
                aligned.append((number, axis))
        yield from fresh(aligned)
    for size in sorted({size for tensor in tensors for size in tensor.shape if size > 1}, reverse=True):
        equal = [(n, a) for n, tensor in enumerate(tensors) for a, s in enumerate(tensor.shape) if s == size]
        yield from fresh(equal)


def select(case: Case, axes: Axes, keep: Sequence[int]) -> Case | None:
    """The case with only these indices along the axes; a run of neighbours stays a view, strides and all."""
    tensors = list(_tensors(case))
    adjacent = list(keep) == list(range(keep[0], keep[0] + len(keep)))
    for number, axis in axes:
        tensor = tensors[number]
        if keep[-1] >= tensor.shape[axis]:
            return None
        if adjacent:
            tensors[number] = compact(tensor.narrow(axis, keep[0], len(keep)))
        else:
            index = torch.tensor(list(keep), device=tensor.device)
            tensors[number] = tensor.index_select(axis, index)
    return _with(case, tensors)


def _tensors(case: Case) -> tuple[torch.Tensor, ...]:
    return (*case.inputs, *case.grad_outputs)


def _with(case: Case, tensors: Sequence[torch.Tensor]) -> Case:
    count = len(case.inputs)
    return replace(case, inputs=tuple(tensors[:count]), grad_outputs=tuple(tensors[count:]), recorded=None)


def _put(case: Case, number: int, values: torch.Tensor) -> Case | None:
    """The case with other values in one tensor, same layout; None where the layout cannot hold them."""
    tensors = list(_tensors(case))
    tensors[number] = compact(tensors[number])
    target = tensors[number]
    # An expanded axis holds one value for all its elements.
    once = tuple(
        slice(0, 1) if stride == 0 else slice(None)
        for size, stride in zip(target.shape, target.stride(), strict=True)
    )
    if not torch.equal(values[once].expand(values.shape), values):
        return None
    target[once].copy_(values[once])
    return _with(case, tensors)


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides in memory of its own that ends where the tensor does; gaps included."""
    if not tensor.numel():
        return tensor.clone()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.as_strided((span,), (1,), tensor.storage_offset()).clone()
    return memory.as_strided(tensor.shape, tensor.stride())


def _powers(tensor: torch.Tensor) -> torch.Tensor:
    """Each element's sign and nearest power of two: a value one can read."""
    wide = tensor.double()
    rounded = torch.where(wide == 0, wide, wide.sign() * torch.exp2(wide.abs().log2().round()))
    return rounded.to(tensor.dtype)


def _size(case: Case) -> int:
    return sum(tensor.numel() for tensor in _tensors(case))


def _pieces(keep: Sequence[int], parts: int) -> Iterator[list[int]]:
    step = -(-len(keep) // parts)
    for start in range(0, len(keep), step):
        yield list(keep[start : start + step])
