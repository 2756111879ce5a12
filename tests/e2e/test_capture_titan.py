"""`bridge capture` on a real torchtitan step, through the real command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from bridge.capture import load_capture

from .conftest import DEMO, bridge_command, command_environment

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("e2e-titan")]


def test_the_step_is_there_and_the_next_command_is_named(demo_run: Path) -> None:
    said = (demo_run / "stdout").read_text()
    assert said.startswith("capture/  step 3  loss ")
    assert said.rstrip().endswith("next: bridge verify --op offset_rmsnorm --from capture/")
    manifest = load_capture(demo_run / "capture").manifest
    assert manifest.complete
    assert (manifest.step, manifest.seed, manifest.problems) == (3, 0, ())
    assert manifest.config["training"]["steps"] == 100
    assert set(manifest.metrics) == {"loss", "grad_norm"}
    assert not [name for name in demo_run.iterdir() if name.name == "outputs"]


def test_every_norm_is_stored_with_parameters_and_gradients(demo_run: Path) -> None:
    capture = load_capture(demo_run / "capture")
    norms = capture.find("KernelOffsetRMSNorm")
    assert [call.module for call in norms] == [
        "layers.0.attention_norm",
        "layers.0.ffn_norm",
        "layers.1.attention_norm",
        "layers.1.ffn_norm",
        "norm",
    ]
    for call in norms:
        tensors = capture.tensors(call)
        x, weight = (tensors[name].requires_grad_() for name in ("inputs/0", "params/weight"))
        y = (1 + weight) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + call.attrs["eps"])
        torch.testing.assert_close(y, tensors["outputs/0"], rtol=1e-5, atol=1e-6)
        y.backward(tensors["grad_outputs/0"])
        torch.testing.assert_close(x.grad, tensors["grad_inputs/0"], rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(weight.grad, tensors["grad_inputs/weight"], rtol=1e-4, atol=1e-7)
    launches = [call for call in capture.calls if call.kind == "launch"]
    assert {call.op for call in launches} >= {
        "offset_rms_norm_forward_kernel",
        "offset_rms_norm_backward_kernel",
    }


def test_the_safetensors_library_alone_reads_them(demo_run: Path) -> None:
    capture = load_capture(demo_run / "capture")
    (call,) = capture.find("norm")
    record = call.outputs[0]
    assert record.blob is not None
    found = []
    for shard in (demo_run / "capture" / "rank_00000").glob("tensors-*.safetensors"):
        with safe_open(shard, framework="np") as file:
            if record.blob in file.keys():
                found.append(file.get_tensor(record.blob))
    (plain,) = found
    assert np.array_equal(plain.reshape(record.shape), capture.tensor(record).numpy())


def test_inspect_counts_what_is_there(demo_run: Path) -> None:
    done = bridge_command("inspect", "capture", "--json", cwd=demo_run)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    capture = load_capture(demo_run / "capture")
    assert summary["complete"] is True
    assert summary["calls"] == sum(summary["by_phase"].values()) == len(capture.calls)
    assert {op["op"]: op["calls"] for op in summary["kernels"]}["offset_rms_norm_forward_kernel"] == 5
    shown = bridge_command("inspect", "capture", "layers.0.ffn_norm", cwd=demo_run)
    assert shown.returncode == 0
    assert "KernelOffsetRMSNorm" in shown.stdout
    assert "stored" in shown.stdout


def test_a_source_folder_called_capture_is_refused_before_training(tmp_path: Path) -> None:
    source = tmp_path / "capture"
    source.mkdir()
    (source / "tracer.py").write_text("print()\n")
    done = bridge_command("capture", "--step", "3", "--config", DEMO / "train.toml", cwd=tmp_path)
    assert done.returncode == 2
    assert "holds something other than a capture (tracer.py)" in done.stderr
    assert "--out" in done.stderr
    assert "step" not in done.stderr
    assert [path.name for path in source.iterdir()] == ["tracer.py"]


def test_a_step_beyond_the_run_exits_2(tmp_path: Path) -> None:
    done = bridge_command("capture", "--config", DEMO / "train.toml", "--step", "500", cwd=tmp_path)
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("bridge: error: ")]
    assert len(errors) == 1
    assert "trains for 100 steps, so step 500 never comes" in errors[0]
    assert done.stdout == ""
    assert not (tmp_path / "capture").exists()


def test_two_ranks_under_torchrun(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *("-m", "bridge", "capture", "--step", "2", "--out", "out", "--json"),
            *("--config", str(DEMO / "train.toml")),
        ],
        cwd=tmp_path,
        env=command_environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    capture = load_capture(tmp_path / "out")
    assert capture.complete, capture.problems
    assert result["calls"] == len(capture.calls)
    assert capture.manifest.world_size == 2
    assert sorted(path.name for path in (tmp_path / "out").glob("rank_*")) == ["rank_00000", "rank_00001"]
    first, second = ([c for c in capture.calls if c.rank == rank] for rank in (0, 1))
    assert [call.key for call in first] == [call.key for call in second]
    # The ranks see other data and hold the same weights.
    (a,), (b,) = (
        [c for c in calls if c.kind == "module" and c.module == "norm"] for calls in (first, second)
    )
    assert not torch.equal(capture.tensor(a.inputs[0]), capture.tensor(b.inputs[0]))
    assert torch.equal(capture.tensor(a.params[0]), capture.tensor(b.params[0]))
