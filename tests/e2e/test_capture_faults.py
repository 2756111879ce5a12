"""Captures whose process is stopped, and two jobs that want one folder."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bridge.capture import capture_run, load_capture
from bridge.capture.folder import FolderClaim
from bridge.config import BridgeConfig, TrainConfig
from bridge.errors import CaptureError
from bridge.inspect_capture import summarise

from .conftest import command_environment

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("e2e-faults")]

#: Stands still in the middle of step 2, after its forward, and says so.
SCRIPT = """
import pathlib, time, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.RMSNorm(64), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(1, 4):
    optimizer.zero_grad()
    for _ in range(100):
        loss = model(torch.randn(8, 64)).pow(2).mean()
    if step == 2:
        pathlib.Path("in-step").touch()
        for _ in range(600):
            time.sleep(0.1)
    loss.backward()
    optimizer.step()
"""


def start(folder: Path, *, out: str = "out") -> subprocess.Popen[str]:
    (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "bridge",
            "capture",
            "--step",
            "2",
            "--out",
            out,
            "--ops",
            "*",
            "--",
            "train.py",
        ],
        cwd=folder,
        env=command_environment(),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        # A shell starts background jobs with Ctrl-C ignored, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 120
    while not (folder / "in-step").exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "the script never came to step 2"
        time.sleep(0.05)
    return process


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)],
    ids=["ctrl-c", "sigterm", "sigkill"],
)
def test_a_stopped_run_leaves_a_readable_capture(tmp_path: Path, number: signal.Signals, code: int) -> None:
    process = start(tmp_path)
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == code, said
    capture = load_capture(tmp_path / "out")
    assert not capture.complete
    assert capture.problems
    assert len([call for call in capture.calls if call.op == "aten::addmm.default"]) >= 100
    stored = [call for call in capture.calls if call.outputs and call.outputs[0].blob is not None]
    assert capture.tensor(stored[0].outputs[0]).numel() > 0
    summary = summarise(tmp_path / "out")
    assert not summary.complete
    assert summary.calls == len(capture.calls)
    # A capture that was cut off is one all the same: --force replaces it, nothing else does.
    with pytest.raises(CaptureError, match="--force"):
        FolderClaim(tmp_path / "out", force=False)
    FolderClaim(tmp_path / "out", force=True).release()


def test_two_jobs_cannot_write_one_folder(tmp_path: Path) -> None:
    process = start(tmp_path)
    try:
        with pytest.raises(CaptureError, match="another process is writing a capture into"):
            capture_run(
                BridgeConfig(train=TrainConfig(script="train.py")), step=1, out=tmp_path / "out", force=True
            )
    finally:
        process.kill()
        process.communicate()
