"""A large case judged a block of rows at a time, where its rows do not depend on each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from bridge.verify.apart import Axis, NotApartError
from bridge.verify.bits import all_finite
from bridge.verify.blocks import Block, Pass, Plan, Surer, surer_rows
from bridge.verify.case import Case
from bridge.verify.companions import Compared
from bridge.verify.compare import Trio, differing, discrete_verdict, judge_tensor, settle_finite
from bridge.verify.eager import Eager, uncut
from bridge.verify.envelope import Envelope
from bridge.verify.execute import Result
from bridge.verify.local import as_matrix, cell_of
from bridge.verify.options import Options
from bridge.verify.part import some_rows
from bridge.verify.poisoned import poisoned_rows
from bridge.verify.spec import KernelSpec
from bridge.verify.stream import Asked, Stream
from bridge.verify.structure import meta_mismatch
from bridge.verify.verdict import Constants, TensorVerdict
from bridge.verify.whole import Whole, near_its_budget, results_of

#: A result that has rows and must be judged whole nevertheless may be this large beside the largest input.
_GATHERED = 1 / 16

Typical = dict[int | None, float | None]


def measure(
    spec: KernelSpec, case: Case, eager: Eager, *, constants: Constants, options: Options
) -> ByRows | Whole:
    """The yardstick of a case: in blocks of rows where it is large and they are independent, else whole.

    Raises:
        SpecError: golden cannot be made.
        KernelError: the reference does not run on the whole.
    """
    if eager.plan is not None:
        try:
            return ByRows(eager.plan, eager.result, constants=constants, options=options)
        except NotApartError as error:
            eager = uncut(spec, case, error)
    made = Whole.of(spec, case, eager.result, constants=constants, options=options)
    if not eager.why:
        return made
    return replace(made, notes=(f"golden was made whole, not in blocks of rows: {eager.why}", *made.notes))


def settle(
    yardstick: ByRows | Whole,
    spec: KernelSpec,
    case: Case,
    target: Result,
    *,
    constants: Constants,
    options: Options,
) -> tuple[ByRows | Whole, list[TensorVerdict]]:
    """The target's tensors held against the yardstick of a case; one made whole where rows do not suffice.

    Raises:
        SpecError: golden cannot be made.
        KernelError: the reference does not run on the whole.
    """
    try:
        return yardstick, yardstick.settled(target)
    except NotApartError as error:
        yardstick = measure(spec, case, uncut(spec, case, error), constants=constants, options=options)
        return yardstick, yardstick.settled(target)


@dataclass(slots=True, kw_only=True)
class _Judged:
    """One tensor of the target on its way to a verdict.

    axis: along which its blocks follow each other; None where it is judged at the end, in one piece.
    gathers: golden, reference and noise are put together for that.
    counts: of discrete elements, as `differing` counts them.
    """

    name: str
    target: torch.Tensor | None
    axis: Axis = None
    gathers: bool = False
    stream: Stream | None = None
    counts: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class _Gathered:
    """Blocks of a small result that is judged whole."""

    golden: list[torch.Tensor] = field(default_factory=list)
    reference: list[torch.Tensor] = field(default_factory=list)
    noise: list[Envelope] = field(default_factory=list)
    ties: list[torch.Tensor] = field(default_factory=list)

    def add(self, name: str, block: Block) -> None:
        self.golden.append(block.golden[name])
        self.reference.append(block.reference[name])
        if name in block.noise:
            self.noise.append(block.noise[name])
        if name in block.ties:
            self.ties.append(block.ties[name])

    def together(self, axis: int) -> tuple[torch.Tensor, torch.Tensor, Envelope | None, torch.Tensor | None]:
        """Golden, reference, noise and ties of all rows."""
        envelope = None
        if len(self.noise) == len(self.golden):
            draws = zip(*(part.draws for part in self.noise), strict=True)
            envelope = Envelope(
                rms=torch.cat([part.rms for part in self.noise], axis),
                draws=[torch.cat(parts, axis) for parts in draws],
            )
        ties = torch.cat(self.ties, axis) if len(self.ties) == len(self.golden) else None
        return torch.cat(self.golden, axis), torch.cat(self.reference, axis), envelope, ties


class ByRows:
    """One large case whose golden and noise exist for a block of rows at a time.

    Raises:
        NotApartError: a result is too large to be judged whole, and cannot be judged by rows.
    """

    def __init__(self, plan: Plan, reference: Result, *, constants: Constants, options: Options) -> None:
        self._plan, self._reference = plan, reference
        self._constants, self._options = constants, options
        self._eager = reference.named()
        self._elementwise = plan.spec.kind == "elementwise"
        self._odd = not all(all_finite(t) for t in plan.case.inputs)
        self._doubts: tuple[str, ...] | None = None
        self._sure: Surer | None = None  #: what many draws of the noise gave where few may have been lucky
        self._over: set[int] = set()  #: rows with an element over its noise budget, where that may be luck
        self._plain: set[str] = set()  #: tensors of which too many elements are over it for that
        largest = max(t.numel() for t in plan.case.inputs)
        for name, axis in plan.rows.results.items():
            like = self._eager.get(name)
            if like is not None and axis is not None and not self._streams(like, axis):
                if like.numel() > _GATHERED * largest:
                    raise NotApartError(f"the last axis of {name} is the one along which its rows lie")

    @property
    def notes(self) -> tuple[str, ...]:
        """How golden was made, and what there is to say about it."""
        text = (
            f"golden and noise were made in {len(self._plan.spans)} blocks of at most {self._plan.height} "
            "rows, which do not depend on each other"
        )
        return (text, *(self._doubts or ()))

    def _streams(self, like: torch.Tensor, axis: int) -> bool:
        if not like.is_floating_point():
            return True
        return axis < like.ndim - 1 if like.ndim > 1 else self._elementwise

    def settled(self, target: Result) -> list[TensorVerdict]:
        """Every tensor; where one fails once more without golden's own ties, and with surer noise.

        Raises:
            NotApartError: a gate is not valid, which is analysed on the whole.
        """
        tensors = self.tensors(target)
        if any(t.verdict == "FAIL" and t.tensor not in target.faults for t in tensors):
            tensors = self.tensors(target, ties=True)
            if any(near_its_budget(t) and t.tensor not in self._plain for t in tensors):
                self._sure = surer_rows(self._plan, sorted(self._over))
                tensors = self.tensors(target, ties=True)
        lacking = [t.tensor for t in tensors if not t.gate_valid and t.structure is None and t.companions]
        if lacking:
            raise NotApartError(f"the gate of {lacking[0]} is not valid, which is analysed on the whole")
        return tensors

    def tensors(self, target: Result, ties: bool = False) -> list[TensorVerdict]:
        """Every output, gradient and differing repeat of the target.

        Args:
            ties: forgive elements where golden itself jumps.
        """
        plan = self._plan
        typical = self._typical(target)
        judged = [
            self._begin(name, result, target, typical)
            for name, result in results_of(plan.spec, self._reference, target)
        ]
        gathered = {item.name: _Gathered() for item in judged if item.gathers}
        way = Pass(plan, plan.spans, check=self._doubts != (), ties=ties, sure=self._sure)
        for block in way:
            for item in judged:
                self._add(item, block, typical)
            for name, parts in gathered.items():
                parts.add(name, block)
        if self._doubts is None:
            self._doubts = way.doubts()
        streams = [item.stream for item in judged if item.stream is not None]
        self._over = {row for stream in streams if stream.lucky for row in stream.over}
        self._plain = {i.name for i in judged if i.stream is not None and not i.stream.lucky}
        noise, jumpy = way.noise(), way.ties() if ties else {}
        golden, eager = dict(way.golden), self._eager | way.reference()
        for name, parts in gathered.items():
            axis = plan.rows.results[name]
            assert axis is not None
            golden[name], eager[name], envelope, mask = parts.together(axis)
            if envelope is not None:
                noise[name] = envelope
            if mask is not None:
                jumpy[name] = mask
        return [self._end(item, target, golden, eager, noise, jumpy) for item in judged]

    def conditioned(self, tensors: list[TensorVerdict], target: Result) -> list[TensorVerdict]:
        """As they are: their gates are valid."""
        return tensors

    def some_rows(self) -> Case:
        """A few of the rows, wrong ones among them."""
        return some_rows(self._plan, self._over)

    def _begin(
        self, name: str, result: torch.Tensor | None, target: Result, typical: Mapping[str, Typical]
    ) -> _Judged:
        like, axis = self._eager.get(name), self._plan.rows.results.get(name)
        item = _Judged(name=name, target=result)
        if like is None or result is None or axis is None or meta_mismatch(result, like) is not None:
            return item
        if not self._streams(like, axis):
            item.gathers = True
            return item
        item.axis = axis
        if like.is_floating_point():
            item.stream = Stream(self._asked(name, like, axis, target))
        return item

    def _asked(self, name: str, like: torch.Tensor, axis: int, target: Result) -> Asked:
        return Asked(
            name=name,
            case=self._plan.case.name,
            shape=tuple(like.shape),
            dtype=like.dtype,
            device=like.device,
            axis=axis,
            constants=self._constants,
            nonfinite_inputs=self._odd,
            fault=target.faults.get(name),
            tiles=target.tiles,
        )

    def _add(self, item: _Judged, block: Block, typical: Mapping[str, Typical]) -> None:
        if item.axis is None or item.target is None:
            return
        reference = block.reference[item.name]
        target = self._part(item.target, item.axis, block)
        free = block.ties.get(item.name)
        if item.stream is None:
            counts = differing(block.golden[item.name], reference, target, free)
            item.counts = (item.counts[0] + counts[0], item.counts[1] + counts[1])
            return
        nan = self._undefined(block.case, reference, block.golden[item.name])
        free = nan if free is None else (free if nan is None else free | nan)
        item.stream.add(block.start, self._compared(item.name, reference, target, block, typical), free)

    def _part(self, tensor: torch.Tensor, axis: int, block: Block) -> torch.Tensor:
        return tensor.narrow(axis, block.start, block.stop - block.start)

    def _undefined(
        self, case: Case, like: torch.Tensor | None, golden: torch.Tensor | None
    ) -> torch.Tensor | None:
        return poisoned_rows(case, like, golden, elementwise=self._elementwise) if self._odd else None

    def _compared(
        self,
        name: str,
        reference: torch.Tensor,
        target: torch.Tensor,
        block: Block,
        typical: Mapping[str, Typical] | None,
    ) -> Compared:
        return Compared(
            golden=block.golden[name].to(torch.float64),
            reference=reference.to(torch.float64),
            target=target.to(torch.float64),
            keep=torch.ones_like(target, dtype=torch.bool),
            dtype=reference.dtype,
            envelope=block.noise.get(name),
            elementwise=self._elementwise,
            typical=None if typical is None else typical.get(name),
        )

    def _typical(self, target: Result) -> dict[str, Typical]:
        """What noise is typical in each tensor, from rows here and there; {} where no rule asks for it."""
        plan = self._plan
        if self._elementwise:
            return {}
        found: dict[str, dict[int | None, list[torch.Tensor]]] = {}
        for block in Pass(plan, plan.showing, check=False):
            for name, axis in plan.rows.results.items():
                like, got = self._eager.get(name), target.named().get(name)
                if like is None or got is None or axis is None or not like.is_floating_point():
                    continue
                if meta_mismatch(got, like) is not None or not self._streams(like, axis):
                    continue
                data = self._compared(name, block.reference[name], self._part(got, axis, block), block, None)
                settle_finite(data, self._odd, None, False)
                rows, cols = as_matrix(like).shape
                cell = cell_of(rows, cols, target.tiles)
                for tile in (None,) if cell is None else (None, cell[1]):
                    found.setdefault(name, {}).setdefault(tile, []).append(data.relative(tile))
        return {name: {tile: _median(parts) for tile, parts in of.items()} for name, of in found.items()}

    def _end(
        self,
        item: _Judged,
        target: Result,
        golden: Mapping[str, torch.Tensor],
        eager: Mapping[str, torch.Tensor | None],
        noise: Mapping[str, Envelope],
        ties: Mapping[str, torch.Tensor],
    ) -> TensorVerdict:
        name, case, like = item.name, self._plan.case, eager.get(item.name)
        if item.stream is not None:
            return item.stream.verdict()
        if item.axis is not None:
            assert like is not None
            return discrete_verdict(
                name,
                case.name,
                dtype=like.dtype,
                shape=tuple(like.shape),
                wrong=item.counts[0],
                off=item.counts[1],
                fault=target.faults.get(name),
            )
        return judge_tensor(
            name,
            case.name,
            # Where shapes or dtypes differ no number of golden's is looked at.
            Trio(golden=golden.get(name, like), reference=like, target=item.target),
            constants=self._constants,
            envelope=noise.get(name),
            elementwise=self._elementwise,
            nonfinite_inputs=self._odd,
            unstable=ties.get(name),
            undefined=self._undefined(case, like, golden.get(name)),
            fault=target.faults.get(name),
            tiles=target.tiles,
        )


def _median(parts: list[torch.Tensor]) -> float | None:
    values = torch.cat([part.reshape(-1) for part in parts])
    return float(values.median()) if values.numel() else None
