"""`bridge verify` on the command line: what it writes, its exit codes, and one line for bad input."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bridge import cli
from bridge.capture import Tracer
from bridge.capture.select import Selection

KERNEL = """
import torch
import triton
import triton.language as tl
from bridge.verify import KernelSpec


@triton.jit
def scale_kernel(x_ptr, w_ptr, y_ptr, n, columns, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    w = tl.load(w_ptr + i % columns, mask=i < n, other=0.0)
    tl.store(y_ptr + i, x * w, mask=i < n)


def launch(x, weight):
    x = x.contiguous()
    y = torch.empty_like(x)
    scale_kernel[(triton.cdiv(x.numel(), 64),)](x, weight.contiguous(), y, x.numel(), x.shape[-1], BLOCK=64)
    return y


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return launch(x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return launch(grad, weight), (grad * x).reshape(-1, x.shape[-1]).sum(0)


def target(x, weight):
    return Scale.apply(x, weight)


def reference(x, weight):
    return x * weight


def sample(shape, dtype, generator, device):
    x = torch.randn(shape, generator=generator, device=device).to(dtype)
    return x, torch.randn(shape[-1], generator=generator, device=device).to(dtype)


SPEC = KernelSpec(
    name="scale", reference=reference, target=target, sample=sample, inputs=("x", "weight"),
    grads=("x", "weight"), outputs=("y",), kind="elementwise", shapes=((4, 16), (3, 7)),
    dtypes=("float32",), sites=("Scaled",),
)
"""

WRONG = KERNEL.replace("tl.store(y_ptr + i, x * w,", "tl.store(y_ptr + i, x * w * 1.01,")


class Scaled(torch.nn.Module):
    """The eager module that the kernel replaces."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(columns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A captured step of two Scaled modules."""
    out = tmp_path_factory.mktemp("run") / "capture"
    torch.manual_seed(0)
    model = torch.nn.Sequential(Scaled(8), torch.nn.Linear(8, 6), Scaled(6))
    tracer = Tracer(model, out=out, step=7, selection=Selection(patterns=("Scaled",)))
    with tracer:
        model(torch.randn(5, 8)).square().sum().backward()
    tracer.finish(metrics={"loss": 1.0})
    return out


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    path = tmp_path / "scale.py"
    path.write_text(KERNEL)
    return path


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Reports go to the current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def verdict_of(folder: Path) -> Any:
    return json.loads((folder / "verdict.json").read_text())


def refused(capfd: pytest.CaptureFixture[str], *arguments: object, isolated: bool = False) -> str:
    """Run a command that must be refused: exit 2, one line on stderr, nothing written.

    A child process per command would spend the tests' time on importing torch; one test does it.
    """
    before = sorted(Path.cwd().rglob("*.html")) + sorted(Path.cwd().rglob("verdict*.json"))
    assert cli.run(["verify", *map(str, arguments), *([] if isolated else ["--in-process"])]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("bridge: error: ") and err.count("\n") == 1, err
    assert sorted(Path.cwd().rglob("*.html")) + sorted(Path.cwd().rglob("verdict*.json")) == before
    return err


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


def test_unknown_ops_and_nothing_to_judge(capfd: pytest.CaptureFixture[str], kernel: Path) -> None:
    assert "did you mean offset_rmsnorm" in refused(capfd, "--op", "ofset_rmsnorm")
    assert "nothing to judge" in refused(capfd)
    assert "name the capture with --from" in refused(capfd, "--kernel", kernel, "--no-sweep")
    assert "name the capture with --from" in refused(capfd, "--kernel", kernel, "--target", "recorded")
    assert "--fudge-factor must be" in refused(capfd, "--kernel", kernel, "--fudge-factor", "0.5")
    assert "leave out --jobs" in refused(capfd, "--kernel", kernel, "--jobs", "2")
    assert "--shape must be sizes" in refused(capfd, "--kernel", kernel, "--shape", "axb")
    assert "--shape must be sizes" in refused(capfd, "--kernel", kernel, "--shape", "3x")
    assert "--op 'nope'" in refused(capfd, "--kernel", kernel, "--op", "nope")


def test_folders_that_are_no_capture(capfd: pytest.CaptureFixture[str], folder: Path, kernel: Path) -> None:
    assert "does not exist" in refused(capfd, "--kernel", kernel, "--from", "absent")
    sources = folder / "capture"
    sources.mkdir()
    (sources / "api.py").write_text("x = 1\n")
    assert "is not a capture" in refused(capfd, "--kernel", kernel, "--from", sources)
    (folder / "empty").mkdir()
    assert "is not a capture" in refused(capfd, "--kernel", kernel, "--from", "empty")
    assert "is not a capture" in refused(capfd, "--kernel", kernel, "--from", kernel)


@pytest.fixture
def copy(captured: Path, folder: Path) -> Path:
    """A copy of the capture, to be damaged."""
    return Path(shutil.copytree(captured, folder / "damaged"))


def test_a_torn_capture_is_refused_and_judged_on_request(
    capfd: pytest.CaptureFixture[str], kernel: Path, copy: Path, folder: Path
) -> None:
    manifest = copy / "manifest.json"
    document = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**document, "complete": False, "ranks": []}))
    assert "--partial" in refused(capfd, "--kernel", kernel, "--from", copy)
    arguments = [
        "verify",
        "--kernel",
        str(kernel),
        "--from",
        str(copy),
        "--no-sweep",
        "--partial",
        "--in-process",
    ]
    assert cli.run(arguments) == 0
    assert any("partial" in text for text in verdict_of(folder)["coverage"]["not_covered"])


def test_a_manifest_cut_short(capfd: pytest.CaptureFixture[str], kernel: Path, copy: Path) -> None:
    manifest = copy / "manifest.json"
    manifest.write_text(manifest.read_text()[:100])
    assert "manifest.json" in refused(capfd, "--kernel", kernel, "--from", copy)


def test_a_capture_without_calls(capfd: pytest.CaptureFixture[str], kernel: Path, copy: Path) -> None:
    manifest = copy / "manifest.json"
    document = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**document, "ranks": []}))
    shutil.rmtree(copy / "rank_00000")
    assert "holds no calls" in refused(capfd, "--kernel", kernel, "--from", copy)


@pytest.mark.parametrize("damage", ["truncate", "flip"])
def test_damaged_tensors(capfd: pytest.CaptureFixture[str], kernel: Path, copy: Path, damage: str) -> None:
    (shard,) = copy.glob("rank_00000/*.safetensors")
    data = bytearray(shard.read_bytes())
    if damage == "truncate":
        del data[-40:]
    else:
        data[-9] ^= 0xFF
    shard.write_bytes(data)
    assert shard.name in refused(capfd, "--kernel", kernel, "--from", copy)


def test_specs_that_do_not_fit(
    capfd: pytest.CaptureFixture[str], captured: Path, folder: Path, kernel: Path
) -> None:
    for old, new, expected in (
        ('inputs=("x", "weight")', 'input=("x", "weight")', "no field `input`"),
        ('grads=("x", "weight")', 'grads=("x", "bias")', "field `grads` names 'bias'"),
        (
            'inputs=("x", "weight")',
            'inputs=("x", "weight", "bias")',
            "nothing for bias; give the spec a `bind`",
        ),
        ('sites=("Scaled",)', 'sites=("Scale",)', "did you mean Scaled?"),
        ('dtypes=("float32",)', 'dtypes=("float16",)', "dtype float32 is not declared (declared: float16)"),
        ("shapes=((4, 16), (3, 7))", "shapes=((2, 4, 16),)", "than the declared shapes give: (2, 4, 16)"),
    ):
        text = KERNEL.replace(old, new)
        assert text != KERNEL
        kernel.write_text(text)
        assert expected in refused(capfd, "--kernel", kernel, "--from", captured)
    assert "does not exist" in refused(capfd, "--kernel", "absent.py")
    kernel.write_text(KERNEL)
    assert "does not declare dtype 'float16'" in refused(capfd, "--kernel", kernel, "--dtype", "float16")
    assert "does not declare shapes like (2, 2, 2)" in refused(capfd, "--kernel", kernel, "--shape", "2x2x2")


def test_a_kernel_that_raises(capfd: pytest.CaptureFixture[str], captured: Path, kernel: Path) -> None:
    kernel.write_text(
        KERNEL.replace("    return Scale.apply(x, weight)", "    raise ValueError('not today')")
    )
    err = refused(capfd, "--kernel", kernel, "--from", captured, isolated=True)
    assert "ValueError: not today" in err and "captured 0" in err
    kernel.write_text(KERNEL.replace("x * w, mask=i < n", "x * undefined_name, mask=i < n"))
    assert "undefined_name" in refused(capfd, "--kernel", kernel)


def test_a_refusal_leaves_the_last_report(captured: Path, kernel: Path, folder: Path) -> None:
    arguments = ["verify", "--kernel", str(kernel), "--from", str(captured), "--no-sweep", "--in-process"]
    assert cli.run(arguments) == 0
    before = (folder / "report.html").read_bytes(), (folder / "verdict.json").read_bytes()
    kernel.write_text(
        KERNEL.replace("    return Scale.apply(x, weight)", "    raise ValueError('not today')")
    )
    assert cli.run(arguments) == 2
    assert before == ((folder / "report.html").read_bytes(), (folder / "verdict.json").read_bytes())
