"""Probes: inputs made so that a right answer is known exactly, or so that none is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from bridge.verify.case import Case
from bridge.verify.every import every_value
from bridge.verify.exact import exact_cases
from bridge.verify.spec import KernelSpec


def probe_cases(
    spec: KernelSpec, start: Case, generator: torch.Generator, draw: Callable[[tuple[int, ...]], Case | None]
) -> Iterator[Case]:
    """Every probe that means something for this kernel; only the reference is run to find out.

    Args:
        start: a drawn case that gives shapes, dtypes and attributes.
        generator: of the probes' own values.
        draw: makes a case of another shape, or None where that is refused.
    """
    yield from exact_cases(spec, start, generator, draw)
    every = every_value(spec, start, generator)
    if every is not None:
        yield every
