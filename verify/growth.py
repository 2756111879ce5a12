"""How errors grow with the length of a reduction: like noise, or like a bias.

Rounding errors of random sign add up like the square root of the number of terms, errors of one sign
(truncation, a stalling accumulator) like the number itself. The exponent p of `error ~ n^p` is fitted to
root-mean-square errors relative to golden over several lengths and seeds, with a confidence interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from bridge.verify.case import Case
from bridge.verify.execute import Result, run, run_target, split
from bridge.verify.golden import run_golden
from bridge.verify.nearby import far_case
from bridge.verify.spec import KernelSpec
from bridge.verify.verdict import Exponent, Growth, Spread

LENGTHS = (32, 64, 128, 256, 512, 1024)
SEEDS = 3
#: Between the slopes of noise (1/2) and of a bias (1).
BIASED = 0.75
#: At the longest length a biased target is also this many times further off than the reference.
_EFFECT = 4.0
#: Extent of the axes that are not summed over.
_ACROSS = 8
#: Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond the table 1.96 + 2.5 / df.
_T = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131)


def fit(lengths: Sequence[int], errors: Sequence[float]) -> Exponent | None:
    """Least squares of log(error) on log(length); None with fewer than three positive errors or one length.

    Args:
        lengths, errors: one pair per run, several per length.
    """
    pairs = [(math.log(n), math.log(e)) for n, e in zip(lengths, errors, strict=True) if e > 0]
    if len(pairs) < 3 or len({x for x, _ in pairs}) < 2:
        return None
    mean_x, mean_y = (sum(p[i] for p in pairs) / len(pairs) for i in (0, 1))
    spread = sum((x - mean_x) ** 2 for x, _ in pairs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in pairs) / spread
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in pairs)
    free = len(pairs) - 2
    quantile = _T[free - 1] if free <= len(_T) else 1.96 + 2.5 / free
    half = quantile * math.sqrt(rest / free / spread)
    return Exponent(value=slope, low=slope - half, high=slope + half, points=len(pairs))


def measure_growth(spec: KernelSpec, case: Case, tensor: str, *, seed: int, device: str) -> Growth | None:
    """Growth of the reference's and the target's error in one tensor.

    Args:
        case: where the gate was not valid; gives dtype, attributes and, when captured, the values.
        device: where the target runs.

    Returns:
        None where fewer than three lengths can be had, or an implementation has no error at all.
    """
    lengths: list[int] = []
    eager: list[float] = []
    fused: list[float] = []
    for length, drawn in _lengthened(spec, case, tensor, seed):
        found = _errors(spec, drawn, tensor, device)
        if found is not None:
            lengths.append(length)
            eager.append(found[0])
            fused.append(found[1])
    reference, target = fit(lengths, eager), fit(lengths, fused)
    if reference is None or target is None or len(set(lengths)) < 3:
        return None
    longest = max(lengths)
    at_end = [
        math.sqrt(
            sum(e * e for n, e in zip(lengths, errors, strict=True) if n == longest) / lengths.count(longest)
        )
        for errors in (eager, fused)
    ]
    biased = target.low > BIASED and reference.high < BIASED and at_end[1] > _EFFECT * at_end[0]
    return Growth(
        reference=reference,
        target=target,
        lengths=tuple(sorted(set(lengths))),
        seeds=SEEDS,
        biased=biased,
        statistic="slope of log(rms error / rms golden) over log(length), least squares, 95 % t interval",
    )


def in_words(growth: Growth) -> str:
    """For the reason of a verdict."""

    def one(exponent: Exponent) -> str:
        return f"{exponent.value:.2f} ({exponent.low:.2f} to {exponent.high:.2f})"

    return (
        f"relative error grows like n^p over {growth.lengths[0]} to {growth.lengths[-1]} terms, "
        f"{growth.seeds} seeds: p = {one(growth.target)} for the target, {one(growth.reference)} for the "
        f"reference" + (": a bias of the target, not noise" if growth.biased else "")
    )


def spread_of(values: torch.Tensor, golden: torch.Tensor) -> Spread | None:
    """Distribution of errors against golden; None where nothing is finite."""
    error = values.to(torch.float64) - golden
    error = error[torch.isfinite(error)]
    if not error.numel():
        return None
    size = error.abs().sort().values
    places = [min(size.numel() - 1, int(q * size.numel())) for q in (0.5, 0.9, 0.99)]
    half, most, nearly = (float(size[p]) for p in places)
    return Spread(median=half, p90=most, p99=nearly, largest=float(size[-1]), mean=float(error.mean()))


def _lengthened(spec: KernelSpec, case: Case, tensor: str, seed: int) -> Iterator[tuple[int, Case]]:
    """Cases of several lengths: the spec's own draws, or windows of a captured call."""
    data = max((t for t in case.inputs if t.is_floating_point()), key=lambda t: t.numel(), default=None)
    if data is None or not data.ndim:
        return
    captured = case.family == "captured"
    axis = _axis(spec, case, tensor, data) if captured else None
    for number in range(SEEDS):
        generator = torch.Generator(device=data.device).manual_seed(seed * 104729 + number)
        for length in LENGTHS:
            made = (
                _window(case, data, axis, length, generator)
                if axis is not None
                else _drawn(spec, case, tensor, length, generator)
            )
            if made is not None:
                yield length, made


def _axis(spec: KernelSpec, case: Case, tensor: str, data: torch.Tensor) -> int:
    """Which axis of the data `tensor` sums over: the first when it has the shape of a row, else the last."""
    shape = (
        tuple(case.inputs[spec.inputs.index(tensor.removeprefix("grad_"))].shape)
        if tensor in {f"grad_{name}" for name in spec.grads}
        else ()
    )
    return 0 if data.ndim > 1 and shape == tuple(data.shape[-1:]) else data.ndim - 1


def _drawn(spec: KernelSpec, case: Case, tensor: str, length: int, generator: torch.Generator) -> Case | None:
    """The spec's sample with one axis of `length`; None where it refuses."""
    data = max((t for t in case.inputs if t.is_floating_point()), key=lambda t: t.numel())
    axis = _axis(spec, case, tensor, data)
    rank = len(spec.shapes[0])
    place = 0 if axis == 0 and data.ndim > 1 else rank - 1
    shape = tuple(length if i == place else _ACROSS for i in range(rank))
    device = str(data.device)
    try:
        inputs = split(spec.sample(shape, getattr(torch, case.dtype), generator, device), len(spec.inputs))
    except Exception:  # a shape that nobody declared
        return None
    return None if isinstance(inputs, str) else _with_upstream(spec, replace(case, inputs=inputs), generator)


def _window(
    case: Case, data: torch.Tensor, axis: int, length: int, generator: torch.Generator
) -> Case | None:
    """`length` neighbours of a captured call along one axis, in every tensor that has the axis."""
    extent = data.shape[axis]
    if length > extent:
        return None
    start = int(torch.randint(0, extent - length + 1, (1,), generator=generator, device=data.device))

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == data.ndim and tensor.shape[axis] == extent:
            return tensor.narrow(axis, start, length).clone()
        if axis == data.ndim - 1 and tensor.ndim and tensor.shape[-1] == extent:
            return tensor.narrow(-1, start, length).clone()
        if axis == 0 and tensor.ndim and tensor.shape[0] == extent:
            return tensor.narrow(0, start, length).clone()
        return tensor

    return replace(
        case,
        inputs=tuple(cut(t) for t in case.inputs),
        grad_outputs=tuple(cut(g) for g in case.grad_outputs),
        recorded=None,
    )


def _with_upstream(spec: KernelSpec, case: Case, generator: torch.Generator) -> Case | None:
    if not case.grad_outputs:
        return case
    try:
        outputs = run(spec.reference, replace(spec, grads=()), case)
    except Exception:  # the reference refuses a shape that nobody declared
        return None
    if isinstance(outputs, str):
        return None
    grads = tuple(
        torch.randn(o.shape, generator=generator, device=o.device).to(g.dtype)
        for o, g in zip(outputs.outputs.values(), case.grad_outputs, strict=True)
    )
    return replace(case, grad_outputs=grads)


def _errors(spec: KernelSpec, case: Case, tensor: str, device: str) -> tuple[float, float] | None:
    """Relative RMS error of reference and target; None where one of them refuses or golden is zero."""
    try:
        golden = run_golden(spec, case)
        reference = run(spec.reference, spec, case)
        target = run_target(spec, far_case(case, device))
    except Exception:  # what fails on these lengths is judged on the cases themselves
        return None
    if not isinstance(reference, Result) or not isinstance(target, Result):
        return None
    exact, eager, fused = (r.named().get(tensor) for r in (golden, reference, target))
    if exact is None or eager is None or fused is None or fused.shape != exact.shape:
        return None
    size = float(exact.square().mean().sqrt())
    if not size > 0 or not math.isfinite(size):
        return None
    errors = [float((t.cpu().to(torch.float64) - exact.cpu()).square().mean().sqrt()) for t in (eager, fused)]
    if not all(math.isfinite(e) for e in errors):
        return None
    return errors[0] / size, errors[1] / size
