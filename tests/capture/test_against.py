"""Captures against a baseline: the first calls that differ, and their tensors alone."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from bridge.capture import capture_run, load_capture
from bridge.config import BridgeConfig, TrainConfig
from bridge.errors import UsageError

SCRIPT = """
    import sys
    import torch
    torch.manual_seed(0)
    class Scale(torch.nn.Module):
        def forward(self, x):
            return x * 1.0001 if sys.argv[1] == "other" else x * 1.0
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.scale, self.down = torch.nn.Linear(8, 8), Scale(), torch.nn.Linear(8, 8)
        def forward(self, x):
            return self.down(self.scale(self.up(x)))
    model = torch.nn.Sequential(Block(), Block())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).pow(2).mean().backward()
        optimizer.step()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    return path


def config(script: Path, which: str) -> BridgeConfig:
    return BridgeConfig(train=TrainConfig(script=str(script), args=(which,)))


def test_the_first_calls_that_differ_keep_their_tensors(script: Path, tmp_path: Path) -> None:
    capture_run(config(script, "base"), step=1, out=tmp_path / "base")
    said: list[str] = []
    result = capture_run(
        config(script, "other"), against=tmp_path / "base", first=3, out=tmp_path / "out", say=said.append
    )
    assert "first at 0.scale" in str(result.trigger)
    assert not [line for line in said if "does not repeat" in line]
    capture = load_capture(result.path)
    assert capture.manifest.selection["patterns"] == ["0.scale", "0.scale/op_0_mul", "0.down"]
    (scale,) = capture.find("0.scale")
    x = capture.tensor(scale.inputs[0])
    assert capture.tensor(scale.outputs[0]).equal(x * 1.0001)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out", "train.py"]


def test_an_equal_run_keeps_digests_and_says_so(script: Path, tmp_path: Path) -> None:
    capture_run(config(script, "base"), step=2, out=tmp_path / "base")
    said: list[str] = []
    result = capture_run(
        config(script, "base"), step=2, against=tmp_path / "base", out=tmp_path / "out", say=said.append
    )
    assert "bit-equal" in " ".join(said)
    assert (result.trigger, result.calls_with_tensors) == (None, 0)


def test_a_run_that_does_not_repeat_is_found_out(script: Path, tmp_path: Path) -> None:
    script.write_text(script.read_text().replace("torch.manual_seed(0)", "torch.seed()"))
    capture_run(config(script, "base"), step=1, out=tmp_path / "base")
    said: list[str] = []
    capture_run(
        config(script, "base"), step=1, against=tmp_path / "base", out=tmp_path / "out", say=said.append
    )
    assert "does not repeat bit for bit" in " ".join(said)


def test_the_baseline_must_have_the_step(script: Path, tmp_path: Path) -> None:
    capture_run(config(script, "base"), step=1, out=tmp_path / "base")
    with pytest.raises(UsageError, match=r"needs one step that it has \(1\), got step 2"):
        capture_run(config(script, "base"), step=2, against=tmp_path / "base", out=tmp_path / "out")
