"""Marks of tensors that are too large to be copied."""

from __future__ import annotations

import pytest
import torch

from bridge.verify import bits
from bridge.verify.bits import OverwrittenError, as_marked, mark, pieces, same_bits


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits, "_PIECE", 64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_mark_sees_one_bit_a_sign_of_zero_and_two_elements_exchanged(dtype: torch.dtype) -> None:
    tensor = torch.randn(20, 30, generator=torch.Generator().manual_seed(1)).to(dtype)
    tensor[0, 0] = 0.0
    what = mark(tensor, clone=False)
    assert isinstance(what, int) and as_marked(tensor, what) is tensor
    for change in (
        lambda t: t[19].mul_(1 + 2 * torch.finfo(dtype).eps),
        lambda t: t[0, :1].neg_(),
        lambda t: t[[3, 4]].copy_(t[[4, 3]]),
        lambda t: t.copy_(t.flip(0)),
    ):
        other = tensor.clone()
        change(other)
        if not torch.equal(other.view(torch.uint8), tensor.view(torch.uint8)):
            with pytest.raises(OverwrittenError):
                as_marked(other, what)


def test_a_copy_is_kept_where_one_is_asked_for_or_costs_nothing() -> None:
    large, small = torch.ones(20, 30), torch.ones(8)
    for tensor, clone in ((large, True), (small, False)):
        what = mark(tensor, clone=clone)
        tensor.zero_()
        assert as_marked(tensor, what).sum() == tensor.numel()


def test_pieces_cover_a_tensor_and_compare_as_it_does() -> None:
    tensor = torch.randn(3, 50, 7)
    assert sum(piece.numel() for piece in pieces(tensor)) == tensor.numel()
    assert max(piece.numel() for piece in pieces(tensor)) <= 64
    other = tensor.clone()
    assert same_bits(tensor, other)
    other[2, 49, 6] += 1
    assert not same_bits(tensor, other)
