"""Replaying the operators of a real step gives what was recorded, bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bridge.capture.replay import differing_outputs, replay_call, why_not_replayable
from bridge.capture.store import Capture
from bridge.errors import CaptureError
from tests.capture.conftest import Trainer

CaptureOf = Callable[..., Capture]


class Attention(nn.Module):
    """Everything a decoder block does that has a layout of its own: heads, masks, dropout, rotary pairs."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(0.2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        dtype, q, k = q.dtype, q.float(), k.float()
        turn = torch.polar(torch.ones(q.shape[-2], 2), torch.arange(q.shape[-2])[:, None] * torch.ones(2))
        q, k = (
            torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (2, 2)).contiguous()) * turn)
            for t in (q, k)
        )
        y = nn.functional.scaled_dot_product_attention(
            q.flatten(-2).to(dtype), k.flatten(-2).to(dtype), v, is_causal=True
        )
        scores = (
            (y @ y.transpose(-1, -2)).masked_fill(torch.ones(8, 8).triu(1).bool(), -torch.inf).softmax(-1)
        )
        x = x + self.drop(self.out((scores @ y).transpose(1, 2).flatten(-2)))
        return (
            torch.cat((x, x.new_zeros(1)[None].expand_as(x)), -1)[..., : x.shape[-1]]
            @ self.embedding.weight.t()
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_hundred_calls_of_a_step_replay_bit_for_bit(
    dtype: str, trainer: Trainer, capture_of: CaptureOf
) -> None:
    proved: Counter[str] = Counter()
    refused: dict[str, str] = {}
    for model in (trainer.model, Attention()):
        run = Trainer(model.to(getattr(torch, dtype)), foreach=True)
        run.step()
        capture = capture_of(run.model, run.step)
        for call in capture.calls:
            if call.kind != "op":
                continue
            reason = why_not_replayable(call)
            if reason is not None:
                refused[call.op] = reason
                continue
            assert differing_outputs(capture, call) == [], (call.key, call.op)
            proved[call.op] += 1
    assert sum(proved.values()) >= 200, proved
    assert len(proved) >= 40
    assert refused == {}


def test_draws_are_repeated_and_leave_the_generator_alone(capture_of: CaptureOf) -> None:
    capture = capture_of(None, lambda: torch.nn.functional.dropout(torch.ones(100), 0.5) + torch.randn(100))
    before = torch.get_rng_state()
    random = [c for c in capture.calls if "rng" in c.flags]
    assert {c.op for c in random} == {"aten::bernoulli_.float", "aten::randn.default"}
    for call in random:
        assert differing_outputs(capture, call) == []
    assert torch.equal(torch.get_rng_state(), before)


def test_arguments_that_share_memory_do_so_in_the_replay(capture_of: CaptureOf) -> None:
    base = torch.arange(6.0)
    capture = capture_of(None, lambda: base[1:5].add_(base[1:5]))
    (call,) = capture.find("add_")
    assert differing_outputs(capture, call) == []
    assert replay_call(capture, call)["0"].tolist() == [2, 4, 6, 8]


def test_lists_with_gaps_and_optional_arguments(capture_of: CaptureOf) -> None:
    x, rows = torch.randn(4, 5, 6), torch.tensor([0, 2])

    def action() -> None:
        x[:, :, rows]
        nn.functional.layer_norm(x, (6,))
        nn.functional.conv1d(x, torch.randn(3, 5, 2), padding=1)
        torch.clamp(x, max=0.5)
        torch.add(x, x, alpha=2)
        x.sum(dim=(0, 1), dtype=torch.float64)
        x.index_put((rows,), torch.tensor(1.0))

    capture = capture_of(None, action)
    for call in capture.calls:
        assert differing_outputs(capture, call) == [], call.op
    assert {c.op for c in capture.calls} >= {
        "aten::index.Tensor",
        "aten::convolution.default",
        "aten::clamp.default",
    }


def test_what_cannot_be_replayed_says_why(trainer: Any, capture_of: CaptureOf) -> None:
    capture = capture_of(trainer.model, trainer.step, patterns=("norm",))
    with pytest.raises(CaptureError, match="only operators are replayed"):
        replay_call(capture, capture.call("norm"))
    with pytest.raises(CaptureError, match="was not stored"):
        replay_call(capture, capture.find("relu")[0])
    with pytest.raises(CaptureError, match="state was not kept"):
        replay_call(capture, capture.find("bernoulli_")[0])
