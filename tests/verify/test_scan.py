"""What scan finds in single calls, and its ranking and resumption over a capture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import Recorder

from bridge.capture.record import Call, TensorRecord
from bridge.errors import NothingJudgedError, UsageError
from bridge.verify import scan
from bridge.verify.scan_table import OpResult, assemble
from bridge.verify.scan_worker import judge_call


class Kept:
    """The tensors of a recorder, as a capture gives them."""

    damage: tuple[str, ...] = ()

    def __init__(self, rec: Recorder) -> None:
        self.rec = rec

    def tensor(self, record: TensorRecord) -> torch.Tensor:
        return self.rec.blobs[record.blob or ""]

    def tensors(self, call: Call) -> dict[str, torch.Tensor]:
        return {f"inputs/{record.name}": self.tensor(record).clone() for record in call.inputs}


def judged(op: str, function: Any, *inputs: torch.Tensor, attrs: dict[str, Any] | None = None) -> OpResult:
    rec = Recorder(keep=True)
    rec.op(op, function, *inputs, attrs=attrs, module="m")
    return judge_call(Kept(rec), rec.calls[0])  # type: ignore[arg-type]


def tf32(t: torch.Tensor) -> torch.Tensor:
    return ((t.view(torch.int32) + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [(8, 16, 8), (64, 512, 32)])
def test_right_matmuls_pass(dtype: torch.dtype, size: tuple[int, int, int]) -> None:
    rows, inner, cols = size
    result = judged(
        "aten::mm.default", torch.mm, torch.randn(rows, inner).to(dtype), torch.randn(inner, cols).to(dtype)
    )
    assert result.verdict == "PASS" and result.margin is not None and result.margin <= 1


def test_a_matmul_in_another_legal_order_passes() -> None:
    def split(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return sum((x[:, k : k + 32] @ w[k : k + 32] for k in range(0, 512, 32)), torch.zeros(64, 32))

    assert judged("aten::mm.default", split, torch.randn(64, 512), torch.randn(512, 32)).verdict == "PASS"


def test_silent_tf32_is_named() -> None:
    result = judged(
        "aten::mm.default", lambda x, w: tf32(x) @ tf32(w), torch.randn(64, 512), torch.randn(512, 32)
    )
    assert result.verdict == "FAIL" and result.cause == "TF32"


def test_bfloat16_factors_are_named() -> None:
    def low(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.bfloat16().double() @ w.bfloat16().double()).float()

    result = judged("aten::mm.default", low, torch.randn(64, 512), torch.randn(512, 32))
    assert result.verdict == "FAIL" and result.cause == "bfloat16 factors"


def test_a_low_precision_accumulator_is_found() -> None:
    def accumulate(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(x.shape[0], w.shape[1], dtype=x.dtype)
        for k in range(x.shape[1]):
            total = total + x[:, k : k + 1] * w[k : k + 1]
        return total

    x, w = torch.rand(16, 256).bfloat16(), torch.rand(256, 8).bfloat16()
    assert judged("aten::mm.default", accumulate, x, w).verdict == "FAIL"


def test_overflow_is_named() -> None:
    x = torch.full((4,), 300.0).half()
    result = judged("aten::mul.Tensor", torch.mul, x, x)
    assert result.verdict == "FAIL" and result.cause == "overflow" and "does not fit float16" in result.reason


def test_a_wrong_result_is_found_in_the_right_place() -> None:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.silu(x).clone()
        y[2, 3] *= 1.01
        return y

    result = judged("aten::silu.default", wrong, torch.randn(8, 8))
    assert result.verdict == "FAIL" and "(2, 3)" in result.reason


@pytest.mark.parametrize(
    ("op", "function", "attrs"),
    [
        ("aten::sum.dim_IntList", lambda x: x.sum(-1), {"dim": [-1]}),
        ("aten::_softmax.default", lambda x: torch.softmax(x, -1), {"dim": -1, "half_to_float": False}),
        ("aten::silu.default", torch.nn.functional.silu, None),
        ("aten::exp.default", torch.exp, None),
        ("aten::rsqrt.default", lambda x: torch.rsqrt(x.abs()).nan_to_num(), None),
    ],
)
def test_right_ops_pass(op: str, function: Any, attrs: dict[str, Any] | None) -> None:
    x = torch.randn(32, 129)
    if "rsqrt" in op:
        x = x.abs() + 0.1
    assert judged(op, function, x, attrs=attrs).verdict == "PASS"


def test_what_cannot_be_run_again_says_why() -> None:
    assert "random" in judged("aten::bernoulli.default", torch.bernoulli, torch.rand(4)).reason
    assert "not registered" in judged("nobody::knows.default", torch.clone, torch.rand(4)).reason


def results() -> dict[int, OpResult]:
    return {
        0: OpResult(key="a", rank=0, index=0, verdict="PASS", margin=0.5),
        1: OpResult(key="b", rank=0, index=1, verdict="FAIL", margin=3.0, cause="TF32", reason="far off"),
        2: OpResult(key="c", rank=0, index=2, verdict="INCONCLUSIVE", margin=0.9),
        3: OpResult(key="d", rank=0, index=3, reason="draws random numbers"),
    }


def a_run(calls: int) -> Any:
    rec = Recorder()
    for place in range(calls):
        rec.op("aten::mm.default", torch.mm, torch.randn(2, 2), torch.randn(2, 2), module=f"m{place}")
    return rec.run("A")


def test_the_worst_call_comes_first_and_is_the_answer() -> None:
    document = assemble(a_run(4), results(), {"module calls": 2}, ())
    assert document.verdict == "FAIL" and not document
    assert document.table.index == [1, 2, 0, 3] and document.table.margin[0] == 3.0
    assert document.findings[0].cause == "TF32" and document.findings[0].row == 0
    assert document.not_judged == {"module calls": 2, "draws random numbers": 1}
    assert document.summary == (
        "1 of 3 judged calls is wrong: m1/op_0_mm (aten::mm.default), TF32, far off; 3 calls were not judged"
    )


def test_many_failures_are_told_by_the_worst_group() -> None:
    wrong = OpResult(key="b", rank=0, index=1, verdict="FAIL", margin=3.0, cause="TF32", reason="far off")
    found = results() | {0: wrong, 1: wrong}
    assert assemble(a_run(4), found, {}, ()).summary == (
        "2 of 3 judged calls are wrong, first of all TF32 in 2 calls of aten::mm.default, worst m0/op_0_mm: "
        "far off; 1 calls were not judged"
    )


def test_without_a_failure_the_answer_says_what_was_left_open() -> None:
    good = {place: result for place, result in results().items() if result.verdict != "FAIL"}
    document = assemble(a_run(4), good, {}, ())
    assert document.verdict == "PASS WITH LIMITATIONS" and document
    assert "1 of 2 judged calls agree" in document.summary


def test_an_interrupted_scan_is_read_up_to_its_torn_line(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    scan._append(file, "this", 5, results()[0])
    scan._append(file, "this", 9, results()[0])  # the same key, of another rank
    scan._append(file, "other", 6, results()[1])
    with file.open("ab") as stream:
        stream.write(b'{"capture": "this", "res')
    assert list(scan._read_results(file, "this")) == [5, 9]
    assert scan._read_results(tmp_path / "absent", "this") == {}


def test_globs_choose_calls_and_unknown_ones_are_refused() -> None:
    run = a_run(3)
    assert scan._chosen(run, ["m1"]) == [1]
    assert scan._chosen(run, ["m1/*", "*mm*"]) == [0, 1, 2]
    with pytest.raises(UsageError, match="matches no call"):
        scan._chosen(run, ["nothing"])


def test_a_capture_of_digests_alone_is_nothing_to_judge(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = a_run(2)
    (tmp_path / "manifest.json").write_text("{}")
    import dataclasses

    opened = dataclasses.replace(run, path=tmp_path, capture=Kept(Recorder()))
    monkeypatch.setattr(scan, "load_run", lambda path, label: opened)
    with pytest.raises(NothingJudgedError, match="only digests"):
        scan.scan_capture(tmp_path)
