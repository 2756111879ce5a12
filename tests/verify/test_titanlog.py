"""torchtitan's activation logs on either side of a comparison."""

from __future__ import annotations

from pathlib import Path

import pytest
from recorded import Options, Recorder, decoder

from bridge.capture.record import Call
from bridge.errors import CaptureError
from bridge.verify.columns import short_op
from bridge.verify.diff import diff_captures
from bridge.verify.titanlog import is_log, read_log


def log_of(calls: list[Call]) -> str:
    """The log that the torchtitan logger would have written of these calls."""
    key_of = {call.index: call.key for call in calls}
    blocks = []
    for call in calls:
        digest = call.outputs[0].digest
        assert digest is not None
        mean = digest.sum / digest.count
        lines = [
            f"[{call.key if call.module else '<none>' + call.key}]",
            f"  Shape: torch.Size({list(call.outputs[0].shape)}), Dtype: torch.{call.outputs[0].dtype}",
            f"  L2 norm: {digest.sq_sum**0.5:.6e}",
            f"  Min: {digest.min:.6e}",
            f"  Max: {digest.max:.6e}",
            f"  Mean: {mean:.6e}",
            f"  Output hash: {digest.abs_sum:.6e}",
            "  Input hashes: "
            + ", ".join(f"{record.digest.abs_sum:.6e}" for record in call.inputs if record.digest),
            "  Input producers: "
            + ";".join("" if record.producer is None else key_of[record.producer] for record in call.inputs),
            "  Location: model.py:12",
        ]
        if call.phase == "backward":
            lines.append("  Phase: backward")
        blocks.append("\n".join(lines))
    rule = "=" * 80
    return f"Total captured activations: {len(calls)}\n{rule}\n\n" + "\n\n".join(blocks) + "\n"


def written(tmp_path: Path, name: str, rec: Recorder) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "rank_0_activations.log").write_text(log_of(rec.calls))
    return folder


def test_a_log_is_recognised_and_read(tmp_path: Path) -> None:
    rec = decoder(Options())
    folder = written(tmp_path, "a", rec)
    assert is_log(folder) and is_log(folder / "rank_0_activations.log")
    calls = read_log(folder)
    assert [call.op for call in calls] == [short_op(call.op) for call in rec.calls]
    assert calls[2].inputs[0].producer == 1
    assert calls[-1].phase == "backward"


def test_two_logs_of_one_run_are_alike(tmp_path: Path) -> None:
    a = written(tmp_path, "a", decoder(Options()))
    b = written(tmp_path, "b", decoder(Options()))
    document = diff_captures(a, b)
    assert document and document.coverage.by_match == {"key": 47}
    assert document.a.source == "torchtitan log"
    assert any("no exact hashes" in note for note in document.coverage.not_covered)


@pytest.mark.parametrize("side", ["a", "b", "both"])
def test_a_fault_is_named_from_logs(tmp_path: Path, side: str) -> None:
    good, bad = decoder(Options()), decoder(Options(norm="fused wrong"))
    a = written(tmp_path, "a", good) if side in ("a", "both") else good.run("A")
    b = written(tmp_path, "b", bad) if side in ("b", "both") else bad.run("B")
    document = diff_captures(a, b)
    assert document.outcome == "DIVERGED"
    assert document.suspects[0].module == "layers.1.norm"


def test_an_empty_log_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "rank_0_activations.log").write_text("Total captured activations: 0\n" + "=" * 80 + "\n")
    with pytest.raises(CaptureError, match="holds no call"):
        read_log(tmp_path)


def test_the_logs_class_root_is_taken_off(tmp_path: Path) -> None:
    text = log_of(decoder(Options()).calls).replace("[layers.", "[FSDPLlama3Model.layers.")
    (tmp_path / "rank_0_activations.log").write_text(text)
    assert all(not call.module.startswith("FSDP") for call in read_log(tmp_path))
