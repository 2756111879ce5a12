"""Ranks of one run put together: shards, parts of a batch, and what is no part of anything."""

from __future__ import annotations

import torch
from recorded import digest_of

from bridge.capture.record import Call, TensorRecord
from bridge.verify.ranks import joined


def record(tensor: torch.Tensor, name: str = "0", **more: object) -> TensorRecord:
    return TensorRecord(
        name=name,
        dtype="float32",
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        digest=digest_of(tensor),
        blob="b",
        **more,  # type: ignore[arg-type]
    )


def call(rank: int, given: TensorRecord, made: TensorRecord, key: str = "x/op_0_mul") -> Call:
    return Call(
        index=0, key=key, kind="op", op="aten::mul", step=1, rank=rank, inputs=(given,), outputs=(made,)
    )


def test_parts_of_a_batch_are_laid_end_to_end_and_what_all_hold_is_kept() -> None:
    x, w = torch.randn(4, 3), torch.randn(3)
    parts = [call(rank, record(x[2 * rank : 2 * rank + 2]), record(w)) for rank in (0, 1)]
    (whole,) = joined(parts)
    assert whole.rank == 0 and whole.inputs[0].shape == (4, 3)
    expected, got = digest_of(x), whole.inputs[0].digest
    assert got is not None and got.hash == "" and got.count == 12
    assert (got.min, got.max) == (expected.min, expected.max)
    assert abs(got.abs_sum - expected.abs_sum) < 1e-5
    assert whole.inputs[0].blob is None, "no single stored tensor is the whole one"
    assert whole.outputs[0] == parts[0].outputs[0]


def test_shards_of_a_dtensor_become_the_whole_tensor_whatever_their_dimension() -> None:
    w = torch.randn(3, 4)
    about = {"subclass": "DTensor", "placements": ("Shard(1)",), "global_shape": (3, 4)}
    shards = [
        call(rank, record(w[:, 2 * rank : 2 * rank + 2].contiguous(), **about), record(w)) for rank in (0, 1)
    ]
    assert joined(shards)[0].inputs[0].shape == (3, 4)


def test_a_scalar_of_each_rank_and_a_call_that_one_rank_lacks_are_left_alone() -> None:
    own = [call(rank, record(torch.tensor(float(rank))), record(torch.ones(2))) for rank in (0, 1)]
    more = call(0, record(torch.ones(2)), record(torch.ones(2)), key="x/op_1_mul")
    whole, alone = joined([*own, more])
    assert whole.inputs[0].digest is None, "shares of a sum have no common digest"
    assert alone == more
