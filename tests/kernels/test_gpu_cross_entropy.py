"""Cross-entropy of many rows on a GPU, where a row is one warp's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bridge.kernels.cross_entropy import kernel
from bridge.kernels.cross_entropy.spec import PLAIN, SPEC
from bridge.verify import KernelSpec

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("family", [None, "confident", "leading classes masked"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", [100, 1000, 4096])
@pytest.mark.parametrize("spec", [SPEC, PLAIN], ids=lambda spec: spec.name)
def test_many_rows(
    gate: SimpleNamespace, spec: KernelSpec, classes: int, dtype: torch.dtype, family: str | None
) -> None:
    rows = kernel._MANY_ROWS + 3
    gate.judge(spec, gate.draw(spec, (rows, classes), dtype, seed=6, family=family))


def test_the_loss_of_a_row_does_not_depend_on_how_many_there_are(gate: SimpleNamespace) -> None:
    """Few rows take more warps each, which sum in another order: to rounding, not to the bit."""
    rows = kernel._MANY_ROWS
    logits, target = gate.draw(SPEC, (rows, 5000), torch.float32, seed=7)
    many = SPEC.target(logits, target, **SPEC.attrs)
    few = SPEC.target(logits[:64], target[:64], **SPEC.attrs)
    torch.testing.assert_close(few, many[:64], rtol=1e-6, atol=1e-6)
