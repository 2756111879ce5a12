"""Repros: small, standalone, failing until the kernel is right."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from bridge import cli
from bridge.errors import UsageError
from bridge.report import write_json
from bridge.verify import verify_kernel
from bridge.verify.options import Options
from bridge.verify.plan import plan_cases
from bridge.verify.registry import load_spec
from bridge.verify.repro import Repro, choose, find_criterion, make_repro
from bridge.verify.verdict import CaseRecord, TensorVerdict, Verdict

KERNEL = """
import torch
import triton
import triton.language as tl
from bridge.verify import KernelSpec


@triton.jit
def scale_kernel(x_ptr, w_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    inside = i < columns
    x = tl.load(x_ptr + row * columns + i, mask=inside, other=0.0)
    w = tl.load(w_ptr + i, mask=inside, other=0.0)
    y = x * w
    # fault
    tl.store(y_ptr + row * columns + i, y, mask=inside)


def launch(x, weight):
    x = x.contiguous()
    y = torch.empty_like(x)
    scale_kernel[(x.shape[0],)](x, weight, y, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return y


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return launch(x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x = launch(grad, weight)
        # backward fault
        return grad_x, (grad * x).sum(0)


def target(x, weight):
    return Scale.apply(x, weight)


def sample(shape, dtype, generator, device):
    x = torch.randn(shape, generator=generator, device=device).to(dtype)
    return x, torch.randn(shape[-1], generator=generator, device=device).to(dtype)


SPEC = KernelSpec(
    name="scale", reference=lambda x, weight: x * weight, target=target, sample=sample,
    inputs=("x", "weight"), grads=("x", "weight"), outputs=("y",), kind="elementwise",
    shapes=((6, 8),), dtypes=("float32",),
)
"""


def broken(folder: Path, fault: str, *, backward: bool = False) -> Path:
    path = folder / "scale.py"
    marker = "# backward fault" if backward else "# fault"
    path.write_text(KERNEL.replace(f"    {marker}\n", f"    {fault}\n"))
    return path


def judged(path: Path) -> Verdict:
    return verify_kernel(path, quick=True)


def loaded(made: Repro) -> Any:
    spec = importlib.util.spec_from_file_location("repro_under_test", made.folder / "repro.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_fault_in_one_place_shrinks_to_it_and_a_repair_passes(tmp_path: Path) -> None:
    path = broken(tmp_path, "y = tl.where((row == 4) & (i == 5), y + 1.0, y)")
    verdict = judged(path)
    assert verdict.verdict == "FAIL"
    made = make_repro(verdict, out=tmp_path / "repro", tensor="y", case="(6, 8) float32", budget=60)
    assert made.before == ((6, 8), (8,))
    # The fault sits at a fixed place, so nothing before it can go.
    assert made.after == ((5, 6), (6,))
    done = subprocess.run([sys.executable, made.folder / "repro.py"], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("FAIL scale y: greatest error 1, limit ")
    imports = {
        line.split()[1].partition(".")[0]
        for line in (made.folder / "repro.py").read_text().splitlines()
        if line.startswith(("import ", "from "))
    }
    assert imports - set(sys.stdlib_module_names) == {"torch"}
    with safe_open(made.folder / "inputs.safetensors", framework="pt") as file:
        assert set(file.keys()) == {"x", "weight", "grad_output y", "golden"}
        assert str(file.get_tensor("golden").dtype) == "torch.float64"
    (made.folder / "scale.py").write_text(KERNEL)
    passed, text = loaded(made).check()
    assert passed, text


def test_a_fault_everywhere_shrinks_to_one_element(tmp_path: Path) -> None:
    made = make_repro(
        judged(broken(tmp_path, "y = y * 1.5")), out=tmp_path / "repro", tensor="grad_x", budget=40
    )
    assert made.after == ((1, 1), (1,))
    passed, text = loaded(made).check()
    assert not passed and text.startswith("scale grad_x: greatest error")


@pytest.mark.parametrize(
    ("fault", "backward", "tensor", "expected"),
    [
        ("y = tl.where(i == 3, float('nan'), y)", False, "y", "wrong NaN/Inf places 1, limit 0"),
        ("grad.zero_()", True, "grad_x", "wrote to grad_output y"),
    ],
)
def test_other_kinds_of_failure(
    tmp_path: Path, fault: str, backward: bool, tensor: str, expected: str
) -> None:
    verdict = judged(broken(tmp_path, fault, backward=backward))
    failed = [entry for entry in verdict.tensors if entry.verdict == "FAIL" and entry.tensor == tensor]
    assert failed, verdict.summary
    made = make_repro(verdict, out=tmp_path / "repro", tensor=tensor, budget=40)
    passed, text = loaded(made).check()
    assert not passed and expected in text


def test_an_error_below_the_threshold_is_told_by_its_size_on_average(tmp_path: Path) -> None:
    spec = load_spec(str(broken(tmp_path, "y = y * (1.0 + 3e-7)"))).spec
    (case,) = plan_cases(spec, options=Options(sweeps=False))
    found = find_criterion(spec, case, entry("y", case.name, error=0.5))
    assert found is not None and found.kind == "rms"
    spec = load_spec(str(broken(tmp_path, "y = y * 1.0"))).spec
    assert find_criterion(spec, case, entry("y", case.name, error=0.5)) is None


def test_a_kernel_that_kills_its_process_is_written_as_it_is(tmp_path: Path) -> None:
    path = broken(tmp_path, "import os; os.abort()", backward=True)
    verdict = verify_kernel(path, quick=True, isolate=True)
    assert verdict.verdict == "FAIL" and "SIGABRT" in verdict.summary
    made = make_repro(verdict, out=tmp_path / "repro")
    assert made.after == ((6, 8), (8,)) and made.tries == 0
    script = [sys.executable, made.folder / "repro.py"]
    assert subprocess.run(script, capture_output=True).returncode < 0
    (made.folder / "scale.py").write_text(KERNEL)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", made.folder / "test_repro.py"], capture_output=True
    )
    assert done.returncode == 0


def entry(tensor: str, case: str, *, error: float, verdict: str = "FAIL") -> TensorVerdict:
    return TensorVerdict(
        tensor=tensor,
        case=case,
        verdict=verdict,
        dtype="float32",
        shape=(1,),
        target_error=error,
        threshold=1.0,
    )  # type: ignore[arg-type]


def test_the_worst_failure_on_real_inputs_is_chosen() -> None:
    cases = tuple(
        CaseRecord(name=name, family=family, dtype="float32", shapes=((1,),))
        for name, family in (("edge", "tile edge"), ("drawn", "declared"), ("real", "captured"))
    )
    tensors = (
        entry("y", "edge", error=99.0),
        entry("y", "drawn", error=50.0),
        entry("y", "real", error=2.0),
        entry("g", "real", error=3.0),
        entry("z", "real", error=900.0, verdict="PASS"),
    )
    document = Verdict(verdict="FAIL", op="op", tensors=tensors, cases=cases)
    assert choose(document, tensor=None, case=None) is tensors[3]
    assert choose(document, tensor="y", case=None) is tensors[2]
    assert choose(document, tensor=None, case="edge") is tensors[0]
    with pytest.raises(UsageError, match="no failing tensor 'z'"):
        choose(document, tensor="z", case=None)
    with pytest.raises(UsageError, match="nothing to reproduce"):
        choose(Verdict(verdict="PASS", op="op"), tensor=None, case=None)


def test_what_changed_since_the_verdict_is_said(tmp_path: Path) -> None:
    path = broken(tmp_path, "y = y * 1.5")
    verdict = judged(path)
    path.write_text(KERNEL)
    with pytest.raises(UsageError, match="does not fail any more"):
        make_repro(verdict, out=tmp_path / "repro")
    path.write_text(KERNEL.replace("x = torch.randn(", "x = 2 * torch.randn("))
    with pytest.raises(UsageError, match=r"inputs of .* are no longer those of the verdict"):
        make_repro(verdict, out=tmp_path / "repro")
    path.unlink()
    with pytest.raises(UsageError, match=r"the kernel file of this verdict, .*, is gone"):
        make_repro(verdict, out=tmp_path / "repro")
    assert not (tmp_path / "repro").exists()


def test_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_json(judged(broken(tmp_path, "y = y * 1.5")), Path("verdict.json"))
    assert cli.run(["repro", "--out", "small", "--budget", "40"]) == 0
    out = capsys.readouterr().out
    assert "to     (1, 1) (1,)" in out and "python small/repro.py" in out
    assert cli.run(["repro", "--out", "small"]) == 2
    assert "small exists" in capsys.readouterr().err
    assert cli.run(["repro", "absent.json"]) == 2
