"""Planted faults in recorded ops are named; legal differences are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recorded import Options, decoder

from bridge.verify.diff import diff_captures
from bridge.verify.diff_document import DiffDocument

FAULTS: list[tuple[dict[str, Any], str, str]] = [
    ({"eps": 1e-2}, "layers.1.norm/op_3_add", "other is 1e-06 in A and 0.01 in B"),
    ({"norm": "fused wrong"}, "layers.1.norm/op_0_fused_norm", "in place of aten::mul.Tensor"),
    ({"weight": True}, "layers.1.feed_forward.w3/op_0_mm", "already differs when the step begins"),
    ({"eps": 1e-2, "extra": True}, "layers.1.norm/op_4_add", "other is 1e-06 in A and 0.01 in B"),
]


def diff(a: Options, b: Options, **more: Any) -> DiffDocument:
    return diff_captures(decoder(a).run("A"), decoder(b).run("B"), **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("fault", "key", "reason"), FAULTS)
def test_the_first_suspect_is_the_planted_call(
    dtype: torch.dtype, fault: dict[str, Any], key: str, reason: str
) -> None:
    document = diff(Options(dtype=dtype), Options(dtype=dtype, **fault))
    assert document.outcome == "DIVERGED" and not document
    assert document.suspects[0].key == key
    assert reason in document.suspects[0].reason
    assert key in document.summary


def test_a_cast_that_only_b_makes_is_named() -> None:
    document = diff(Options(), Options(cast=True))
    assert document.suspects[0].key == "layers.1.feed_forward/op_0__to_copy"
    assert "which A does not" in document.suspects[0].reason


def test_another_dropout_seed_is_nondeterminism() -> None:
    document = diff(Options(dropout=7), Options(dropout=8))
    first = document.suspects[0]
    assert first.key == "layers.1.feed_forward/op_2_native_dropout"
    assert first.attribution is not None and first.attribution.origin == "nondeterministic"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("legal", [{"order": True}, {"norm": "fused"}, {"extra": True}])
def test_legal_differences_name_no_suspect(dtype: torch.dtype, legal: dict[str, Any]) -> None:
    document = diff(Options(dtype=dtype, layers=6), Options(dtype=dtype, layers=6, **legal))
    assert document.suspects == ()
    assert document.outcome in ("IDENTICAL", "SAME WITHIN ROUNDING") and document


def test_weights_that_all_differ_come_from_earlier_steps() -> None:
    document = diff(Options(seed=0), Options(seed=1), allow_mismatch=True)
    assert document.outcome == "INCONCLUSIVE"
    assert "--find-step" in document.summary
    assert document.suspects == ()


def test_what_follows_a_fault_is_inherited() -> None:
    document = diff(Options(), Options(eps=1e-2))
    assert document.coverage.by_origin["born"] == 1
    assert document.coverage.by_origin["inherited"] > 10
