"""`bridge verify` and its relatives on a real torchtitan step, through the real command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import bridge_command, command_environment

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("e2e-titan")]


def document(folder: Path) -> Any:
    return json.loads((folder / "verdict.json").read_text(encoding="utf-8"))


def test_the_kernel_of_the_run_passes_on_its_own_inputs(demo_run: Path, tmp_path: Path) -> None:
    done = bridge_command(
        "verify", "--op", "offset_rmsnorm", "--from", demo_run / "capture", "--no-sweep", "--config",
        demo_run / "train.toml", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = document(tmp_path)
    assert found["verdict"] == "PASS" and found["fidelity"]["status"] == "bit-equal"
    assert "offset_rms_norm_forward_kernel" in found["fidelity"]["kernels"]
    assert [case["family"] for case in found["cases"]] == ["captured"] * 4
    assert (tmp_path / "report.html").is_file()
    # The same numbers, from the laptop's point of view: no kernel is run.
    done = bridge_command(
        "verify",
        "--op",
        "offset_rmsnorm",
        "--from",
        demo_run / "capture",
        "--target",
        "recorded",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    recorded = document(tmp_path)
    assert recorded["fidelity"]["status"] == "recorded"
    errors = {(e["tensor"], e["case"]): e["target_error"] for e in recorded["tensors"]}
    assert errors == {(e["tensor"], e["case"]): e["target_error"] for e in found["tensors"]}
    # And again from the bundle that the verdict names, from another folder.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = bridge_command("recheck", tmp_path / "verdict.json", "--run", cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    assert "nothing else changed: same kernel, versions, inputs and errors" in done.stdout


def test_a_broken_kernel_fails_on_them_and_its_repro_stands_alone(demo_run: Path, tmp_path: Path) -> None:
    done = bridge_command(
        "verify", "--op", "offset_rmsnorm", "--kernel", demo_run / "broken_kernel.py", "--from",
        demo_run / "capture", "--no-sweep", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    found = document(tmp_path)
    assert {entry["tensor"] for entry in found["tensors"] if entry["verdict"] == "FAIL"} == {"grad_x"}
    assert "grad_x" in found["summary"]
    done = bridge_command("repro", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for command in (
        [sys.executable, "repro/repro.py"],
        [sys.executable, "-m", "pytest", "-q", "repro/test_repro.py"],
    ):
        ran = subprocess.run(command, cwd=tmp_path, env=command_environment(), capture_output=True, text=True)
        assert ran.returncode == 1, ran.stderr
        assert "offset_rmsnorm grad_x: greatest error" in ran.stdout


def test_an_override_is_judged_without_a_spec(demo_run: Path, tmp_path: Path) -> None:
    override = "bridge.kernels.offset_rmsnorm.override.offset_rmsnorm"
    done = bridge_command("verify", "--op", override, "--from", demo_run / "capture", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = document(tmp_path)
    assert (found["verdict"], found["op"], found["fidelity"]["status"]) == ("PASS", override, "bit-equal")


def test_what_the_capture_lacks_is_said_in_one_line(demo_run: Path, tmp_path: Path) -> None:
    for arguments, expected in (
        (("--op", "ofset_rmsnorm"), "did you mean offset_rmsnorm"),
        (("--op", "layer_norm"), "has no forward or optimizer call of"),
    ):
        done = bridge_command("verify", *arguments, "--from", demo_run / "capture", cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith("bridge: error: ") and done.stderr.count("\n") == 1
        assert expected in done.stderr
    assert list(tmp_path.iterdir()) == []
