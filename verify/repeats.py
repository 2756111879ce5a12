"""The same inputs once more: other bits are legal, other values are not.

Repeats of a large case are run when its first result was judged and is gone, so that no two are held at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

from bridge.verify.bits import is_marked, mark, same_bits
from bridge.verify.case import Case
from bridge.verify.eager import tidy
from bridge.verify.execute import Result, run_target
from bridge.verify.interleaved import CROSSED, interleaved
from bridge.verify.options import Options
from bridge.verify.spec import KernelSpec
from bridge.verify.verdict import TensorVerdict


def repeat(spec: KernelSpec, case: Case, first: Result, options: Options) -> None:
    """Run the same inputs again; results that differ bitwise are noted in `first`, to be judged as well."""

    def compare(again: Result, *, crossed: bool) -> None:
        for name, text in again.faults.items():
            first.faults.setdefault(name, text)
        for name, tensor in again.named().items():
            was = first.named().get(name)
            if tensor is not None and was is not None and not same_bits(tensor, was):
                first.differing.setdefault(name, []).append(tensor)
                if crossed:
                    first.doubted.setdefault(name, CROSSED)

    _repeat(spec, case, compare, options)


def judge_repeats(
    spec: KernelSpec,
    case: Case,
    first: Result,
    settled: Callable[[Result], list[TensorVerdict]],
    options: Options,
    *,
    release: bool,
) -> tuple[list[TensorVerdict], dict[str, int]]:
    """Run the same inputs again, and judge at once what differs from the first run.

    Args:
        first: judged already; what is to be said of a repeat that is wrong is noted there.
        settled: judges a result.
        release: drop the tensors of `first`; only checksums of them are needed.

    Returns:
        The tensors of repeats that differ or are at fault, and how many results of each name differ,
        those of a second backward among them.
    """
    marks = {name: mark(t, clone=False) for name, t in first.named().items() if t is not None}
    counts = Counter({name: len(others) for name, others in first.differing.items()})
    if release:
        first.outputs, first.grads, first.differing = {}, {}, {}
    found: list[TensorVerdict] = []

    def compare(again: Result, *, crossed: bool) -> None:
        other = {n for n, t in again.named().items() if t is not None and not is_marked(t, marks.get(n, t))}
        counts.update(other)
        for name in other if crossed else ():
            first.doubted.setdefault(name, CROSSED)
        odd = other | (again.faults.keys() - first.faults.keys())
        if odd:
            found.extend(t for t in settled(again) if t.tensor in odd)

    _repeat(spec, case, compare, options)
    return found, dict(counts)


class _Compare(Protocol):
    def __call__(self, again: Result, *, crossed: bool) -> None: ...


def _repeat(spec: KernelSpec, case: Case, compare: _Compare, options: Options) -> None:
    """Each repeat is compared, and gone before the next one.

    Args:
        compare: `crossed` says whether another call came between forward and backward.
    """
    for number in range(options.repeats - 1):
        tidy(case, options)
        result = run_target(spec, case) if number else interleaved(spec, case)
        if isinstance(result, Result):
            compare(result, crossed=not number)
        del result
