"""Which inputs are drawn for a spec."""

from __future__ import annotations

from typing import Any

import torch

from bridge.verify.options import Options
from bridge.verify.plan import plan_cases
from bridge.verify.spec import KernelSpec


def _sample(shape: tuple[int, ...], dtype: torch.dtype, generator: Any, device: str) -> tuple[torch.Tensor]:
    return (torch.randn(shape, generator=generator, device=device).to(dtype),)


def test_a_spec_may_declare_several_ranks() -> None:
    """A vector beside matrices: all are judged, edges are looked for in the rank that comes first."""
    spec = KernelSpec(
        name="double",
        reference=lambda x: 2 * x,
        target=lambda x: 2 * x,
        sample=_sample,
        inputs=("x",),
        kind="elementwise",
        shapes=((1025,), (8, 33), (2, 3, 5)),
        dtypes=("float32",),
    )
    for first in spec.shapes:
        shapes = (first, *(shape for shape in spec.shapes if shape != first))
        cases = plan_cases(KernelSpec(**{**vars(spec), "shapes": shapes}), options=Options(), tiles=(16,))
        declared = [tuple(case.inputs[0].shape) for case in cases if case.family == "declared"]
        assert declared == list(shapes)
        edges = {case.inputs[0].dim() for case in cases if case.family in ("smallest", "tile edge")}
        assert edges == {len(first)}
