"""`bridge verify` on the command line: what it writes, its exit codes, and a kernel that crashes or hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scale_cli import KERNEL, WRONG, refused, verdict_of

from bridge import cli


def test_a_good_kernel_on_captured_and_drawn_inputs(
    captured: Path, kernel: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        cli.run(["verify", "--kernel", str(kernel), "--from", str(captured), "--junit", "out/junit.xml"]) == 0
    )
    out, _ = capfd.readouterr()
    assert out.startswith("PASS") and "report.html" in out and "verdict.json" in out
    document = verdict_of(folder)
    assert document["verdict"] == "PASS" and document["op"] == "scale"
    families = [case["family"] for case in document["cases"]]
    assert families[:3] == ["captured", "captured", "declared"] and "tile edge" in families
    assert {entry["tensor"] for entry in document["tensors"]} == {"y", "grad_x", "grad_weight"}
    # The run was eager there, and says so; the kernel gives the same bits all the same.
    assert document["fidelity"]["status"] == "bit-equal"
    assert document["fidelity"]["kernels"] == ["scale_kernel"]
    assert len(document["provenance"]["kernel_sha256"]) == 64
    assert all(case["input_digests"] for case in document["cases"])
    assert (folder / "report.html").stat().st_size > 10_000
    assert (folder / "out" / "junit.xml").is_file()
    assert not (folder / "verdict.declared.json").exists()


def test_a_wrong_kernel_fails_and_json_goes_to_stdout(
    captured: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "wrong.py").write_text(WRONG)
    arguments = [
        "verify",
        "--kernel",
        "wrong.py",
        "--from",
        str(captured),
        "--no-sweep",
        "--json",
        "--report",
        "r/x.html",
    ]
    assert cli.run(arguments) == 1
    out, err = capfd.readouterr()
    assert json.loads(out) == verdict_of(folder / "r")
    assert json.loads(out)["verdict"] == "FAIL"
    assert "FAIL" in err and (folder / "r" / "x.html").is_file()


def test_constants_come_from_the_flag_then_the_config_then_the_spec(
    captured: Path, kernel: Path, folder: Path
) -> None:
    (folder / "train.toml").write_text("[verify]\nfudge_factor = 3.0\nproject_atol = 0.5\n")
    arguments = [
        "verify",
        "--kernel",
        str(kernel),
        "--from",
        str(captured),
        "--no-sweep",
        "--max-calls",
        "1",
        "--in-process",
    ]
    assert cli.run([*arguments, "--config", "train.toml", "--fudge-factor", "4"]) == 0
    document = verdict_of(folder)
    assert document["constants"] == {
        "fudge_factor": 4.0,
        "project_atol": 0.5,
        "max_reference_relative_error": 0.1,
    }
    assert "1 call beyond --max-calls 1" in document["coverage"]["not_covered"]


def test_dtypes_shapes_and_quick_limit_what_is_drawn(kernel: Path, folder: Path) -> None:
    assert (
        cli.run(
            [
                "verify",
                "--kernel",
                str(kernel),
                "--shape",
                "2x5",
                "--dtype",
                "float32",
                "--quick",
                "--in-process",
            ]
        )
        == 0
    )
    document = verdict_of(folder)
    assert [case["shapes"][0] for case in document["cases"]] == [[2, 5]]
    assert any("--quick" in text for text in document["coverage"]["not_covered"])


def test_an_eager_fallback_is_not_judged(
    kernel: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kernel.write_text(
        KERNEL.replace("return Scale.apply(x, weight)", "return torch.addcmul(x * 0, x, weight)")
    )
    assert cli.run(["verify", "--kernel", str(kernel), "--quick", "--in-process"]) == 3
    assert "launched no kernel" in verdict_of(folder)["summary"]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("import ctypes; ctypes.string_at(0)", "SIGSEGV, segmentation fault in target (scale.py:"),
        ("import time; time.sleep(1000)", "hangs (--timeout)"),
        ("import os; os._exit(9)", "exit status 9"),
    ],
)
def test_a_crash_or_a_hang_fails_its_case_and_the_others_are_judged(
    captured: Path, kernel: Path, folder: Path, fault: str, reason: str
) -> None:
    bad = f"    if x.shape[-1] == 6:\n        {fault}\n    return Scale.apply(x, weight)"
    kernel.write_text(KERNEL.replace("    return Scale.apply(x, weight)", bad))
    arguments = ["verify", "--kernel", str(kernel), "--from", str(captured), "--no-sweep", "--timeout", "20"]
    assert cli.run(arguments) == 1
    document = verdict_of(folder)
    assert {case["name"]: case["verdict"] for case in document["cases"]} == {
        "captured 0 (step 7)": "PASS",
        "captured 2 (step 7)": "FAIL",
    }
    assert reason in document["summary"] and "captured 2" in document["summary"]
    failed = {entry["tensor"] for entry in document["tensors"] if entry["verdict"] == "FAIL"}
    assert failed == {"y", "grad_x", "grad_weight"}


def test_a_crash_while_tile_sizes_are_looked_for_is_found_in_its_case(kernel: Path, folder: Path) -> None:
    bad = "    if tuple(x.shape) == (3, 7):\n        import os; os.abort()\n    return Scale.apply(x, weight)"
    kernel.write_text(KERNEL.replace("    return Scale.apply(x, weight)", bad))
    assert cli.run(["verify", "--kernel", str(kernel)]) == 1
    document = verdict_of(folder)
    failed = [case["name"] for case in document["cases"] if case["verdict"] == "FAIL"]
    assert failed[0] == "(3, 7) float32" and all(name.startswith("(3, 7)") for name in failed)
    assert "SIGABRT" in document["summary"]
    # The launches on the other shapes show the tile sizes.
    assert {case["family"] for case in document["cases"]} >= {"declared", "tile edge"}


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_exits_130_and_leaves_its_declaration(
    how: signal.Signals, kernel: Path, folder: Path
) -> None:
    temporary = folder / "tmp"
    temporary.mkdir()
    kernel.write_text(
        KERNEL.replace("    return Scale.apply(x, weight)", "    import time; time.sleep(1000)")
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "bridge", "verify", "--kernel", str(kernel)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    declaration = folder / "verdict.declared.json"
    while not declaration.exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    process.send_signal(how)
    assert process.wait() == 130
    assert not list(temporary.glob("bridge-*"))
    assert "interrupted" in process.communicate()[1]
    declared = json.loads(declaration.read_text())
    assert declared["constants"]["fudge_factor"] == 2.0 and "(4, 16) float32" in declared["input_digests"]
    assert len(declared["provenance"]["kernel_sha256"]) == 64
    assert not (folder / "verdict.json").exists()


def test_a_kernel_that_exits_is_named(capfd: pytest.CaptureFixture[str], kernel: Path) -> None:
    kernel.write_text(KERNEL.replace("    return Scale.apply(x, weight)", "    raise SystemExit(0)"))
    assert "calls sys.exit(0)" in refused(capfd, "--kernel", kernel)
