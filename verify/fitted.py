"""Wrong variants with an unknown number: a divisor, a constant, a sign. The number is fitted to the target.

A mean over the wrong count, a forgotten scale, an inverse rotation that turns forward: each is the right
formula but for one factor. How far the results move with that factor is found by a second run, and the
factor that brings them nearest to the target's by least squares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from bridge.verify.evidence import Evidence
from bridge.verify.execute import Result
from bridge.verify.spec import KernelSpec
from bridge.verify.trace import Op, Trace, times
from bridge.verify.variant import Variant

#: Factors closer to 1 than this change nothing worth naming, ones beyond the other no formula slips to.
_NEAR, _FAR = 1e-3, 1e5
#: Groups of ops tried on one case.
_MOST = 48
#: A formula with more constants than this is not tried with each in the place of each.
_MOST_CONSTANTS = 12
_STEPS = 3


def fitted(spec: KernelSpec, trace: Trace, e: Evidence) -> list[Variant]:
    """A factor on every constant, every sum, every input of the backward, and every result."""
    found = [_of_result(e, name) for name in e.failed]
    if any(name not in spec.outputs for name in e.failed):
        found += [_of_input(spec, e, i) for i, t in enumerate(e.case.inputs) if t.is_floating_point()]
    groups = _groups(trace)[:_MOST]
    return found + [_of_group(spec, e, group) for group in groups] + _mixed_up(groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Ops that share a constant, or one sum.

    words: what they do, "in the backward, `div` of grad_output, x"; key: the same on every case.
    """

    words: str
    key: str
    ops: list[Op]
    value: float | None = None

    def with_constant(self, other: float) -> str:
        verb = "divides by" if self.ops[0].name == "div" else "multiplies by"
        return f"{self.words} {verb} {other:.4g} where {self.value:g} is meant"

    def factor(self, other: float) -> float:
        """By how much results change when the constant is `other`."""
        assert self.value is not None
        return self.value / other if self.ops[0].name == "div" else other / self.value


def _mixed_up(groups: list[_Group]) -> list[Variant]:
    """A constant of the formula in the place of another one: no fit is needed to try those."""
    values = sorted({abs(g.value) for g in groups if g.value not in (None, 0.0, 1.0)})
    if len(values) > _MOST_CONSTANTS:
        return []
    return [
        Variant(
            text=f"{group.with_constant(other)}: that is the constant of another step",
            rank="formula",
            key=f"constant {number} on {group.key}",
            changes={op.number: times(group.factor(other)) for op in group.ops},
        )
        for group in groups
        for number, other in enumerate(values)
        if group.value and abs(other - abs(group.value)) > _NEAR * abs(group.value)
    ]


def _groups(trace: Trace) -> list[_Group]:
    """Ops that share a constant, forward and backward apart; and every sum of the forward alone."""
    constants: dict[tuple[bool, str, float], list[Op]] = {}
    sums: list[_Group] = []
    for op in trace.ops.values():
        if not op.out.is_floating_point():
            continue
        value = _constant(op)
        if value is not None:
            constants.setdefault((op.backward, op.name, value), []).append(op)
        if op.name in ("sum", "mean") and not op.backward:
            sums.append(_Group(words=f"the {op.name} of {op.origin}", key=f"sum {len(sums)}", ops=[op]))
    named = []
    for number, ((_, name, value), ops) in enumerate(constants.items()):
        words = f"{ops[0].side}`{name}` of {ops[0].origin}"
        named.append(_Group(words=words, key=f"constant {number}", ops=ops, value=value))
    return named + sums


def _constant(op: Op) -> float | None:
    if op.name not in ("mul", "div") or len(op.args) < 2:
        return None
    value = op.args[1]
    if isinstance(value, torch.Tensor):
        return float(value) if value.ndim == 0 and not value.requires_grad else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _of_group(spec: KernelSpec, e: Evidence, group: _Group) -> Variant:
    def text(factor: float) -> str:
        if group.value is not None:
            value = group.value / factor if group.ops[0].name == "div" else group.value * factor
            return group.with_constant(value)
        if factor < 0 and abs(factor + 1) < _NEAR:
            return f"{group.words} enters with the wrong sign"
        return f"{group.words} is {factor:.4g} times what it must be (a wrong count, or a scale lost)"

    base = Variant(text=group.words, rank="formula", key=f"factor on {group.key}")
    return _fitting(spec, e, base, lambda f: {"changes": {op.number: times(f) for op in group.ops}}, text)


def _of_input(spec: KernelSpec, e: Evidence, place: int) -> Variant:
    name = spec.inputs[place]

    def text(factor: float) -> str:
        if abs(factor + 1) < 0.02:
            return f"the backward uses {name} with the sign of the forward where the opposite one is needed"
        return f"the backward uses {name} times {factor:.4g}"

    base = Variant(text=name, rank="formula", key=f"factor on input {name} in the backward")
    return _fitting(spec, e, base, lambda f: {"scaled": {place: f}}, text)


def _of_result(e: Evidence, name: str) -> Variant:
    """The whole result off by one factor: no run is needed to find it."""
    base = Variant(text=name, rank="formula", key=f"factor on the result {name}")

    def fit() -> Variant | None:
        eager, got = e.reference.named().get(name), e.target.named().get(name)
        if eager is None or got is None or eager.shape != got.shape or not eager.is_floating_point():
            return None
        factor = _least(
            eager.double(), got.double(), torch.zeros_like(eager, dtype=torch.float64), e.scale(name)
        )
        if factor is None or not _NEAR < abs(factor - 1) < _FAR or abs(factor) < _NEAR:
            return None
        words = "has the wrong sign" if abs(factor + 1) < _NEAR else f"is {factor:.4g} times what it must be"
        return replace(base, text=f"`{name}` as a whole {words}", after=_scaled(name, factor))

    return replace(base, fit=fit)


def _fitting(
    spec: KernelSpec,
    e: Evidence,
    base: Variant,
    fields: Callable[[float], dict[str, object]],
    text: Callable[[float], str],
) -> Variant:
    def made(factor: float) -> Variant:
        return replace(base, text=text(factor), **fields(factor))  # type: ignore[arg-type]

    def fit() -> Variant | None:
        factor = _solve(spec, e, lambda f: made(f).run(spec, e.case))
        return made(factor) if factor is not None else None

    return replace(base, fit=fit)


def _solve(spec: KernelSpec, e: Evidence, run: Callable[[float], Result]) -> float | None:
    """The factor that brings the failed tensors nearest to the target's, by a few secant steps."""
    factor, step = 1.0, 0.5
    for _ in range(_STEPS):
        try:
            here, there = run(factor).named(), run(factor + step).named()
        except Exception:  # a factor that the formula does not take explains nothing
            return None
        moved = []
        for name in e.failed:
            a, b, got = here.get(name), there.get(name), e.target.named().get(name)
            if a is None or b is None or got is None or a.shape != got.shape or not a.is_floating_point():
                return None
            share = _least((b.double() - a.double()) / step, got.double(), a.double(), e.scale(name))
            if share is not None:
                moved.append(share)
        if not moved:
            return None
        by = sorted(moved)[len(moved) // 2]
        factor += by
        if abs(by) < 1e-4 * abs(factor) or not abs(factor) < _FAR:
            break
        step = max(1e-3, min(0.5, abs(by) / 4))
    return _tidy(factor) if _NEAR < abs(factor - 1) < _FAR else None


def _least(
    direction: torch.Tensor, wanted: torch.Tensor, now: torch.Tensor, scale: torch.Tensor
) -> float | None:
    """Multiple of `direction` that takes `now` nearest to `wanted`; None where it moves nothing."""
    use = torch.isfinite(direction) & torch.isfinite(wanted) & torch.isfinite(now)
    along = (direction / scale)[use].clamp(-1e12, 1e12)
    gap = ((wanted - now) / scale)[use].clamp(-1e12, 1e12)
    size = float(along.square().sum())
    return float((along * gap).sum()) / size if size > 1.0 else None


def _tidy(factor: float) -> float:
    """The simple number that a fit is within its own error of."""
    for candidate in (
        float(round(factor)),
        1.0 / round(1.0 / factor) if abs(factor) > 1e-6 and round(1.0 / factor) else factor,
    ):
        if candidate and abs(candidate - factor) < 1e-3 * abs(factor):
            return candidate
    return factor


def _scaled(name: str, factor: float) -> Callable[[Result], Result]:
    def after(result: Result) -> Result:
        grads = {
            n: t * factor if t is not None and f"grad_{n}" == name else t for n, t in result.grads.items()
        }
        outputs = {n: t * factor if n == name else t for n, t in result.outputs.items()}
        return replace(result, outputs=outputs, grads=grads)

    return after
