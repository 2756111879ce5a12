"""Golden and the noise envelope of a large case, a block of rows after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from bridge.verify.added import Cascade, may_add, run_wide
from bridge.verify.apart import NotApartError, Rows, rows_apart
from bridge.verify.case import Case
from bridge.verify.envelope import DRAWS_SURE, Envelope, Gathered, draws_of, wider
from bridge.verify.execute import Result, copy_with_layout, run
from bridge.verify.golden import run_golden
from bridge.verify.golden_check import Checked, Doubt, check_golden, disagree
from bridge.verify.noise import noisy
from bridge.verify.rownoise import Law, PartialSum, RowNoisy
from bridge.verify.spec import KernelSpec
from bridge.verify.stability import MOVES, jumps, moved_golden, size_of

#: Part of the largest input's bytes that a block has in FP64; its intermediates are some 20 to 50 times that.
_SHARE = 1 / 16
#: Elements of a block: enough to be worth the calls, and on the host few enough for the caches.
_LEAST, _MOST = 1 << 11, 1 << 16
#: Numbers of rows at which the reference's steps are learned.
_LEARNED = (2, 3)
#: Rows that show what noise is typical, and in how many places they are taken.
_SHOWING, _PLACES = 256, 8

#: Sets the seeds of what belongs to all rows apart from those of single rows.
_SHARED = 1 << 32

Span = tuple[int, int]
#: Spread of the noise of single rows, by result and row.
Surer = dict[str, dict[int, torch.Tensor]]


@dataclass(slots=True, kw_only=True)
class Block:
    """Some rows of a case; results that have rows, by the names of the verdict table.

    reference: in its own dtypes.
    ties: where golden itself jumps; empty unless asked for.
    """

    start: int
    stop: int
    case: Case
    golden: dict[str, torch.Tensor]
    reference: dict[str, torch.Tensor]
    noise: dict[str, Envelope]
    ties: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a case is cut, and what was learned about it on the way."""

    spec: KernelSpec
    case: Case
    rows: Rows
    law: Law
    dtypes: dict[str, torch.dtype]  #: that each result is judged in
    sizes: dict[str, int]  #: elements of each result
    seed: int
    height: int  #: rows of a block
    added: bool  #: what has no rows may be added up over the reference's blocks

    @property
    def spans(self) -> list[Span]:
        """All rows, block by block."""
        extent = self.rows.extent
        return [(at, min(extent, at + self.height)) for at in range(0, extent, self.height)]

    @property
    def showing(self) -> list[Span]:
        """A few rows here and there."""
        extent = self.rows.extent
        count = max(1, min(extent // 16, _SHOWING) // _PLACES)
        last = extent - count
        return sorted({(at, at + count) for at in (last * i // (_PLACES - 1) for i in range(_PLACES))})


def plan_blocks(spec: KernelSpec, case: Case, *, seed: int) -> Plan:
    """How to cut a case into blocks of rows.

    Raises:
        NotApartError: it cannot be cut.
    """
    rows = rows_apart(spec, case)
    largest = max(case.inputs, key=torch.numel)
    size = largest.numel()
    whole = sum(t.numel() for t, a in zip(case.inputs, rows.inputs, strict=True) if a is None)
    if 16 * whole > size:
        raise NotApartError("what belongs to all rows is too large to be gone through with every block")
    share = int(_SHARE * size * largest.element_size() / torch.float64.itemsize)
    most = max(_LEAST, min(share, _MOST) if largest.device.type == "cpu" else share)
    likes = {name: like for name in rows.results if (like := rows.like(name)) is not None}
    return Plan(
        spec=spec,
        case=case,
        rows=rows,
        law=_law(spec, case, rows, seed),
        dtypes={name: like.dtype for name, like in likes.items()},
        sizes={name: like.numel() for name, like in likes.items()},
        seed=seed,
        height=max(1, rows.extent * most // size),
        added=may_add(spec, case, rows),
    )


def _law(spec: KernelSpec, case: Case, rows: Rows, seed: int) -> Law:
    """The reference's steps, as they follow the number of rows."""
    device = case.inputs[0].device
    learned = []
    for count in _LEARNED:
        generator = torch.Generator(device=device).manual_seed(seed)
        mode = RowNoisy(generator, generator, stable=spec.kind != "elementwise")
        run_noisy(spec, rows.block(case, 0, count), rows, mode)
        learned.append(mode.steps)
    return Law(few=_LEARNED[0], more=_LEARNED[1], small=learned[0], large=learned[1])


class _Draws:
    """Draws of the noise envelope, block by block; of what has no rows the sums of all blocks."""

    def __init__(self, plan: Plan, device: torch.device, seed: int, count: int) -> None:
        self._plan = plan
        self._seeds = [seed * 1009 + number for number in range(count)]
        self._generators = [torch.Generator(device=device).manual_seed(seed) for seed in self._seeds]
        self._drawn: list[dict[str, torch.Tensor]] = [{} for _ in self._generators]
        self._sums: dict[str, list[PartialSum]] = {}

    def block(self, case: Case, golden: dict[str, torch.Tensor], count: int) -> dict[str, Envelope]:
        """Noise of one block of `count` rows; golden: all results of the block."""
        plan, spec = self._plan, self._plan.spec
        gathered: dict[str, Gathered] = {}
        for number, generator in enumerate(self._generators):
            # What belongs to all rows gets the same noise in every block.
            shared = torch.Generator(device=generator.device).manual_seed(self._seeds[number] + _SHARED)
            mode = RowNoisy(generator, shared, stable=spec.kind != "elementwise", law=plan.law, rows=count)
            for name, tensor in run_noisy(spec, case, plan.rows, mode).named().items():
                want = golden.get(name)
                if tensor is None or want is None or tensor.shape != want.shape:
                    continue
                if not tensor.is_floating_point():
                    continue
                if plan.rows.results[name] is not None:
                    into = gathered.setdefault(name, Gathered.like(want))
                    into.add(mode.unrounded(tensor), want, tensor.dtype)
                    continue
                _add(self._drawn[number], name, mode.unrounded(tensor))
                if number == 0:
                    self._add_sums(name, mode.partial_sums(tensor))
        return {name: item.envelope() for name, item in gathered.items()}

    def _add_sums(self, name: str, parts: list[PartialSum]) -> None:
        known = self._sums.setdefault(name, [])
        if not known:
            known += parts
            return
        for one, other in zip(known, parts, strict=True):
            one.add(other)

    def whole(self, golden: dict[str, torch.Tensor], count: int | None = None) -> dict[str, Envelope]:
        """Noise of what has no rows, when all blocks are through; count: how often the last sum is drawn."""
        found = {}
        few = len(self._generators)
        for name, want in golden.items():
            draws = [
                self._drawn[place % few][name]
                + sum(part.noise(self._generators[place % few]) for part in self._sums[name])
                for place in range(count or few)
                if name in self._drawn[place % few]
            ]
            if draws:
                found[name] = Envelope.of(draws, want, self._plan.dtypes[name])
        return found


def surer_rows(plan: Plan, rows: Sequence[int]) -> Surer:
    """The spread of the noise in these rows, from many draws: of millions of elements some few are lucky."""
    draws = _Draws(plan, plan.case.inputs[0].device, plan.seed + 1, DRAWS_SURE)
    found: Surer = {}
    for start in range(0, len(rows), plan.height):
        some = rows[start : start + plan.height]
        case = plan.rows.pick(plan.case, some)
        golden = {n: t for n, t in run_golden(plan.spec, case).named().items() if t is not None}
        for name, envelope in draws.block(case, golden, len(some)).items():
            axis = plan.rows.results[name]
            assert axis is not None
            found.setdefault(name, {}).update(zip(some, envelope.rms.unbind(axis), strict=True))
    return found


class Pass:
    """One way through all rows, or some; what has no rows is complete when the way is at its end.

    Args:
        spans: which rows.
        check: run golden's sums in two orders.
        ties: find the elements where golden jumps.
        sure: the spread of many more draws in some rows, taken where it is larger; as `surer_rows` gives it.
    """

    def __init__(
        self,
        plan: Plan,
        spans: Sequence[Span],
        *,
        check: bool = True,
        ties: bool = False,
        sure: Surer | None = None,
    ) -> None:
        self._plan, self._spans = plan, spans
        self._check, self._ties = check, ties
        device = plan.case.inputs[0].device
        self._few = _Draws(plan, device, plan.seed, draws_of(plan.case))
        self._sure = sure
        self._sizes = [size_of(t) for t in plan.case.inputs] if ties else []
        axes = plan.rows.results
        self._whole = [name for name in plan.dtypes if axes[name] is None]
        self.golden: dict[str, torch.Tensor] = {}
        self._again: dict[str, torch.Tensor] = {}
        self._lost: dict[str, torch.Tensor] = {}
        self._moved: list[dict[str, torch.Tensor]] = [{} for _ in MOVES]
        self._doubts: dict[str, Doubt] = {}
        self._sums: dict[str, Cascade] = {}

    def __iter__(self) -> Iterator[Block]:
        plan = self._plan
        for start, stop in self._spans:
            case = plan.rows.block(plan.case, start, stop)
            checked = self._checked(case, stop - start)
            named = {n: t for n, t in checked.golden.named().items() if t is not None}
            block = Block(
                start=start,
                stop=stop,
                case=case,
                golden={n: t for n, t in named.items() if n not in self._whole},
                reference=self._reference(case, named),
                noise={},
            )
            self._add_golden(named, checked.again)
            block.noise = self._few.block(case, named, stop - start)
            self._widen(block)
            if self._ties:
                self._add_ties(block, named)
            yield block

    def _checked(self, case: Case, count: int) -> Checked:
        plan = self._plan
        if not self._check:
            return Checked(golden=run_golden(plan.spec, case), again=None, doubts={})
        refused = next((d.refused for d in self._doubts.values() if d.refused), "")
        dtypes = {n: d for n, d in plan.dtypes.items() if n not in self._whole}
        times = plan.rows.extent / count
        found = check_golden(plan.spec, case, dtypes, times=times, refused=refused)
        for name, doubt in found.doubts.items():
            known = self._doubts.setdefault(name, Doubt(count=0))
            known.count += doubt.count
            known.left += doubt.left
            known.refused = known.refused or doubt.refused
        return found

    def _reference(self, case: Case, golden: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the reference gives for these rows.

        Raises:
            NotApartError: it takes these rows in another way than those at which it was looked first.
        """
        plan = self._plan
        if plan.added:
            result = run_wide(plan.spec, case, plan.rows)
        else:
            grads = tuple(name for name in plan.spec.grads if plan.rows.results[f"grad_{name}"] is not None)
            result = run(plan.spec.reference, replace(plan.spec, grads=grads), case)
        if isinstance(result, str):
            raise NotApartError(f"the reference {result}")
        named = {name: tensor for name, tensor in result.named().items() if tensor is not None}
        found = {name: tensor for name, tensor in named.items() if name not in self._whole}
        for name, tensor in found.items():
            if name not in golden or tensor.shape != golden[name].shape or tensor.dtype != plan.dtypes[name]:
                raise NotApartError(f"the reference gives another {name} for some rows than for others")
        for name in self._whole if plan.added else ():
            self._sums.setdefault(name, Cascade()).add(named[name])
        return found

    def reference(self) -> dict[str, torch.Tensor]:
        """What has no rows as the reference gives it; {} where that is not added up over the blocks."""
        return {name: total.sum().to(self._plan.dtypes[name]) for name, total in self._sums.items()}

    def _add_golden(self, named: dict[str, torch.Tensor], again: Result | None) -> None:
        other = again.named() if again is not None else {}
        for name in self._whole:
            _add(self.golden, name, named[name])
            second = other.get(name)
            if second is not None:
                self._add_again(name, second)

    def _add_again(self, name: str, part: torch.Tensor) -> None:
        """Add up once more, keeping what each addition loses (Knuth's two-sum): in effect another order."""
        if name not in self._again or not part.is_floating_point():
            _add(self._again, name, part)
            self._lost[name] = torch.zeros_like(part)
            return
        one = self._again[name]
        total = one + part
        seen = total - one
        self._lost[name] += (one - (total - seen)) + (part - seen)
        self._again[name] = total

    def _widen(self, block: Block) -> None:
        for name, rows in (self._sure or {}).items():
            axis = self._plan.rows.results[name]
            for row, spread in rows.items():
                if axis is not None and block.start <= row < block.stop and name in block.noise:
                    mine = block.noise[name].rms.select(axis, row - block.start)
                    mine.copy_(torch.maximum(mine, spread))

    def _add_ties(self, block: Block, named: dict[str, torch.Tensor]) -> None:
        plan = self._plan
        for number, move in enumerate(MOVES):
            seeds = [
                ((plan.seed * 7919 + number) * 64 + place) * 1_000_003 + (0 if axis is None else block.start)
                for place, axis in enumerate(plan.rows.inputs)
            ]
            moved = moved_golden(plan.spec, block.case, move, self._sizes, seeds)
            for name, other in moved.named().items():
                if other is None or name not in named:
                    continue
                if name in self._whole:
                    _add(self._moved[number], name, other)
                    continue
                jumped = jumps(named[name], other, move)
                if jumped is not None:
                    block.ties[name] = block.ties[name] | jumped if name in block.ties else jumped

    def noise(self) -> dict[str, Envelope]:
        """Of what has no rows."""
        found = self._few.whole(self.golden)
        return found if self._sure is None else wider(found, self._few.whole(self.golden, DRAWS_SURE))

    def ties(self) -> dict[str, torch.Tensor]:
        """Of what has no rows: where golden jumps."""
        masks: dict[str, torch.Tensor] = {}
        for move, moved in zip(MOVES, self._moved, strict=True):
            for name, other in moved.items():
                jumped = jumps(self.golden[name], other, move)
                if jumped is not None:
                    masks[name] = masks[name] | jumped if name in masks else jumped
        return masks

    def doubts(self) -> tuple[str, ...]:
        """What golden's two orders of summation say, in words."""
        plan, found = self._plan, dict(self._doubts)
        for name, again in self._again.items():
            dtype, golden = plan.dtypes[name], self.golden[name]
            if dtype.is_floating_point and golden.is_floating_point():
                count = int(disagree(golden, again + self._lost[name], dtype).sum())
                if count:
                    found[name] = Doubt(count=count, refused="its sums run over all rows")
        return tuple(doubt.told(name, plan.sizes[name]) for name, doubt in found.items())


def _add(into: dict[str, torch.Tensor], name: str, part: torch.Tensor) -> None:
    into[name] = into[name] + part if name in into else part


def run_noisy(spec: KernelSpec, block: Case, rows: Rows, mode: RowNoisy) -> Result:
    """The reference under `mode` on some rows.

    Raises:
        NotApartError: it takes other steps than it did for other rows.
    """
    inputs = tuple(copy_with_layout(t) for t in block.inputs)
    upstream = tuple(copy_with_layout(t) for t in block.grad_outputs)
    mode.given(inputs, rows.inputs)
    mode.given(upstream, rows.upstream)
    result = run(spec.reference, spec, block, inputs=inputs, grad_outputs=upstream, context=noisy(mode))
    if isinstance(result, str):
        raise NotApartError(f"the reference {result}")
    return result
