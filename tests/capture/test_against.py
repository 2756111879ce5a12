"""Captures against a baseline: the first calls that differ, and their tensors alone."""

from __future__ import annotations

import subprocess
import sys
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


RANKS = """
    import os, sys
    import torch
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    class Scale(torch.nn.Module):
        def forward(self, x):
            return x * (1.0001 if sys.argv[1] == "other" and rank == 1 else 1.0)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(8, 8), Scale(), torch.nn.Linear(8, 8))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).pow(2).mean().backward()
        optimizer.step()
"""

PROGRAM = """
    import sys
    import torch
    from bridge.capture import capture_run
    from bridge.capture.against import _leave_process_group
    from bridge.config import BridgeConfig, TrainConfig
    torch.set_num_threads(1)
    folder = sys.argv[1]
    def config(which):
        return BridgeConfig(train=TrainConfig(script=f"{folder}/train.py", args=(which,)))
    capture_run(config("base"), step=1, out=f"{folder}/base")
    _leave_process_group()
    capture_run(config("other"), against=f"{folder}/base", first=2, out=f"{folder}/out", say=print)
"""


def test_ranks_are_compared_with_themselves(tmp_path: Path) -> None:
    """Rank 1 alone differs: both ranks keep the tensors of the calls at which it does."""
    for name, text in (("train.py", RANKS), ("program.py", PROGRAM)):
        (tmp_path / name).write_text(textwrap.dedent(text), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0"]
    done = subprocess.run(
        [*command, "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", tmp_path / "program.py", tmp_path],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "leaves" in done.stdout
    capture = load_capture(tmp_path / "out")
    assert capture.complete
    assert capture.manifest.selection["patterns"] == ["1", "1/op_0_mul"]
    for rank in (0, 1):
        scale = capture.call("1", rank=rank)
        x, y = capture.tensor(scale.inputs[0]), capture.tensor(scale.outputs[0])
        assert y.equal(x * (1.0001 if rank else 1.0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out", "program.py", "train.py"]
