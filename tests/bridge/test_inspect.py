"""`bridge inspect`: counts, one call in detail, incomplete captures, old logs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bridge.capture import Tracer
from bridge.capture.select import Selection
from bridge.cli import run
from bridge.inspect_capture import find_calls, summarise

LOG = """Total captured activations: 1
================================================================================

[layers.0.wq/op_0_mm]
  Shape: torch.Size([8, 16]), Dtype: torch.bfloat16
  L2 norm: 2.000000e+00
  Min: -1.000000e+00
  Max: 1.500000e+00
  Mean: 2.500000e-01
  Output hash: 6.400000e+01

"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of two linear layers, one of which makes a NaN; tensors of the RMSNorm alone."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("inspect") / "capture"
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.RMSNorm(8), torch.nn.Linear(8, 1))
    tracer = Tracer(
        model, out=path, step=7, seed=3, selection=Selection(patterns=("RMSNorm",), max_tensor_bytes=100)
    )
    with tracer:
        loss = model(torch.randn(5, 4)).mean()
        loss.backward()
        (loss * float("nan")).detach()
    tracer.finish(metrics={"loss": float(loss.detach())})
    return path


def test_the_summary_counts(folder: Path) -> None:
    summary = summarise(folder)
    assert (summary.format, summary.complete, summary.step, summary.steps) == ("capture", True, 7, (7,))
    assert summary.calls == sum(summary.by_phase.values()) == sum(summary.by_kind.values())
    assert summary.by_kind["module"] == 4
    assert {op.op: op.calls for op in summary.ops}["Linear"] == 2
    assert summary.metrics["loss"] is not None
    assert [op.op for op in summary.kernels] == []
    assert any("mul" in key for key in summary.nonfinite)
    assert summary.missing == ()
    assert {drop.bytes for drop in summary.dropped} == {160}


def test_text_and_json_say_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(folder), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema_version"] == 1
    assert run(["inspect", str(folder)]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0] == f"{folder}: capture, complete"
    assert f"calls      {document['calls']}:" in text
    assert "not finite" in text
    assert "dropped" in text
    assert "larger than 100 bytes" in text


def test_one_call_with_its_tensors(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(folder), "1"]) == 0
    text = capsys.readouterr().out
    for part in (
        "RMSNorm",
        "input      0",
        "float32 5x8",
        "param      weight",
        "grad in    weight",
        "stored",
    ):
        assert part in text
    assert run(["inspect", str(folder), "RMSNorm", "--json"]) == 0
    (call,) = json.loads(capsys.readouterr().out)
    assert call["module"] == "1"


def test_many_matches_are_cut_and_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(folder), "*", "--limit", "2"]) == 0
    matches = len(find_calls(folder, "*"))
    assert f"{matches - 2} more match *" in capsys.readouterr().out


def test_an_unknown_key_lists_near_misses(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(folder), "RMSNrm"]) == 2
    assert "did you mean" in capsys.readouterr().err


def test_a_process_that_died_is_said_to_be_incomplete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(4, 4)
    with pytest.raises(ZeroDivisionError), Tracer(model, out=tmp_path / "c", step=1):
        model(torch.randn(2, 4))
        1 / 0  # noqa: B018
    assert run(["inspect", str(tmp_path / "c")]) == 2
    text = capsys.readouterr().out
    state, problem, *_ = text.splitlines()
    assert "INCOMPLETE" in state
    assert problem.startswith("  problem ")
    assert "ZeroDivisionError" in text
    assert run(["inspect", str(tmp_path / "c"), "--json"]) == 2


def test_not_a_capture_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.py").write_text("")
    for path in (tmp_path, tmp_path / "nothing", tmp_path / "x.py"):
        assert run(["inspect", str(path)]) == 2
        assert capsys.readouterr().err.startswith("bridge: error: ")


def test_a_part_of_a_capture_names_the_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part in ("manifest.json", "rank_00000", "rank_00000/calls.jsonl"):
        assert run(["inspect", str(folder / part)]) == 2
        assert f"is a part of the capture {folder.resolve()}; name that" in capsys.readouterr().err


def test_old_activation_logs_are_summarised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank_0_activations.log").write_text(LOG)
    assert run(["inspect", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "activation log" in text
    assert "statistics only" in text
    assert run(["inspect", str(tmp_path / "rank_0_activations.log"), "layers.0.wq/*"]) == 0
    assert "bfloat16 8x16" in capsys.readouterr().out
