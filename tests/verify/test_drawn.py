"""What the run's inputs have that drawn ones lack."""

from __future__ import annotations

from typing import Any

import torch

from bridge.verify import drawn
from bridge.verify.case import Case
from bridge.verify.spec import KernelSpec


def identity(x: torch.Tensor) -> torch.Tensor:
    return x


def sample(
    shape: tuple[int, ...], dtype: torch.dtype, generator: Any, device: str
) -> tuple[torch.Tensor, ...]:
    return (torch.randn(shape, generator=generator).to(dtype),)


SPEC = KernelSpec(
    name="identity", reference=identity, target=identity, sample=sample, inputs=("x",), grads=("x",),
    outputs=("y",), kind="elementwise", shapes=((64, 128),), dtypes=("float32",),
)  # fmt: skip


def case(x: torch.Tensor, grad: torch.Tensor, *, family: str = "captured") -> Case:
    return Case(name="c", family=family, dtype="float32", inputs=(x,), attrs={}, grad_outputs=(grad,))


def tell(x: torch.Tensor, grad: torch.Tensor | None = None) -> tuple[str, ...]:
    torch.manual_seed(0)
    plain = [case(torch.randn(64, 128), torch.randn(64, 128), family="declared") for _ in range(2)]
    return drawn.compare(SPEC, [case(x, torch.randn(64, 128) if grad is None else grad)], plain)


def test_another_draw_of_the_same_kind_tells_nothing() -> None:
    torch.manual_seed(1)
    assert tell(torch.randn(64, 128)) == ()


def test_small_rows_large_rows_outliers_and_offsets_are_told() -> None:
    torch.manual_seed(1)
    x = torch.randn(64, 128)
    x[0] *= 1e-4
    (text, *_) = tell(x)
    assert text.startswith("x: row RMS falls to") and "drawn inputs stay above 0.8" in text
    x = torch.randn(64, 128)
    x[3, 5] = 1000.0
    assert any("row RMS reaches 88" in text for text in tell(x))
    assert any("|mean| over spread of a row reaches" in text for text in tell(torch.randn(64, 128) + 50))


def test_layout_comes_first() -> None:
    torch.manual_seed(1)
    texts = tell(torch.randn(64, 128), torch.ones(1).expand(64, 128))
    assert texts[0] == "grad_output y is expanded (stride 0) in the run; `sample` never draws it so"
    texts = tell(torch.randn(128, 64).t())
    assert texts[0].startswith("x is not contiguous (strides (1, 64))")
    texts = tell(torch.randn(64 * 128 + 3)[3:].view(64, 128))
    assert texts[0].startswith("x is at offset 3 of its storage")


def test_more_rows_than_any_draw_are_told() -> None:
    torch.manual_seed(1)
    texts = tell(torch.randn(1000, 128))
    assert "x: 1000 rows in the run; drawn inputs have at most 64" in texts


def test_integers_empty_and_nonfinite_tensors_are_survived() -> None:
    assert drawn.features(torch.empty(0, 4)) == {}
    assert drawn.features(torch.full((2, 2), float("nan"))) == {}
    one = torch.tensor([[1.0, float("inf")]])
    assert drawn.features(one)["row RMS"].high < 1.0
