"""The gate on parts of a tensor: tiles as the kernel's launches show them."""

from __future__ import annotations

import torch

from bridge.verify.compare import Trio, judge_tensor
from bridge.verify.envelope import Envelope
from bridge.verify.local import block_max
from bridge.verify.verdict import Constants, TensorVerdict


def _judged(wrong: float, tiles: tuple[int, ...]) -> TensorVerdict:
    """A [33, 70] FP32 result whose last 16 x 16 tile is 1e-5 of the rest, and off by `wrong` there."""
    generator = torch.Generator().manual_seed(3)
    golden = torch.randn(33, 70, generator=generator, dtype=torch.float64)
    golden[16:32, 48:64] *= 1e-5
    target = golden.clone()
    target[16:32, 48:64] *= 1 + wrong
    draws = [
        golden * (1 + 1.2e-7 * torch.randn(golden.shape, generator=generator, dtype=torch.float64))
        for _ in range(6)
    ]
    return judge_tensor(
        "y",
        "case",
        Trio(golden=golden, reference=golden.float(), target=target.float()),
        constants=Constants(),
        envelope=Envelope.of(draws, golden, torch.float32),
        elementwise=False,
        tiles=tiles,
    )


def test_a_quiet_tile_that_is_wrong_shows_in_the_tile_gate_only() -> None:
    assert _judged(3e-4, ()).verdict == "PASS"
    found = _judged(3e-4, (16,))
    assert found.verdict == "FAIL"
    assert [name for name, check in found.companions.items() if not check.passed] == ["tile gate"]
    assert "worst tile (1, 3) of 16 x 16" in found.companions["tile gate"].detail
    assert _judged(0.0, (16,)).verdict == "PASS"


def test_tiles_that_cut_nothing_give_no_gate() -> None:
    assert "tile gate" not in _judged(0.0, (128,)).companions
    assert "of 33 x 64" in _judged(0.0, (64,)).companions["tile gate"].detail


def test_blocks_at_the_edge_count_as_they_are() -> None:
    matrix = torch.arange(15.0).reshape(3, 5)
    assert block_max(matrix, 2, 2).tolist() == [[6.0, 8.0, 9.0], [11.0, 13.0, 14.0]]
