"""Repros of kernels without a spec (functions, custom ops, torchtitan overrides) and of one that raises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bridge.verify import verify_kernel
from bridge.verify.registry import prepare_triton
from bridge.verify.repro import Repro, make_repro
from bridge.verify.request import Request
from bridge.verify.session import execute

torch.set_num_threads(1)

TWINS = """
import torch

def eager(x: torch.Tensor, y: torch.Tensor, scale: float = 3.0) -> torch.Tensor:
    return x + scale * y

@torch.library.custom_op("NAMESPACE::scaled_add", mutates_args=())
def scaled_add(x: torch.Tensor, y: torch.Tensor, scale: float = 3.0) -> torch.Tensor:
    return x + FAULT * scale * y

scaled_add.register_autograd(
    lambda ctx, grad: (grad.clone(), ctx.scale * grad, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "scale", inputs[2]),
)

def between(x: torch.Tensor, scale: float = 3.0, *, y: torch.Tensor) -> torch.Tensor:
    return scaled_add(x, y, scale)

def eager_between(x: torch.Tensor, scale: float = 3.0, *, y: torch.Tensor) -> torch.Tensor:
    return eager(x, y, scale)
"""
OVERRIDE = """
from dataclasses import dataclass

from torchtitan.config import derive, override
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.overrides.fused_swiglu import FusedSwiGLU, fused_swiglu


class BrokenSwiGLU(FusedSwiGLU):
    @dataclass(kw_only=True, slots=True)
    class Config(FusedSwiGLU.Config):
        pass

    def forward(self, x):
        return super().forward(x) * FAULT


@override(target=FeedForward.Config, description="One factor wrong.")
def broken_swiglu(cfg: FeedForward.Config) -> FeedForward.Config:
    return derive(fused_swiglu(cfg), BrokenSwiGLU.Config) if type(cfg) is FeedForward.Config else cfg
"""


def script(made: Repro, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run what was written, elsewhere and without this project."""
    code = "import runpy, sys; sys.modules['bridge'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    command = [sys.executable, "-P", "-c", code, str(made.folder / "repro.py")]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def pytest_of(made: Repro) -> int:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(made.folder / "test_repro.py"),
    ]
    return subprocess.run(command, capture_output=True, check=False).returncode


@pytest.mark.parametrize("place", ["file", "op"])
def test_a_function_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    name = f"repro_twins_{place}"
    file, out = tmp_path / "lib" / f"{name}.py", tmp_path / "out"
    file.parent.mkdir()
    file.write_text(TWINS.replace("NAMESPACE", name).replace("FAULT", "1.01"))
    monkeypatch.syspath_prepend(str(file.parent))
    pair = {"reference": f"{file}:eager_between", "target_fn": f"{file}:between"}
    if place == "op":
        pair = {"reference": f"{name}.eager", "target_fn": f"torch.ops.{name}.scaled_add"}
    request = Request(**pair, shapes=((4, 6),), quick=True)
    verdict = execute(request)
    assert verdict.verdict == "FAIL", verdict.summary
    made = make_repro(verdict, out=out, budget=40)
    assert made.after == ((1, 1), (1, 1))
    done = script(made, tmp_path)
    assert done.returncode == 1 and "greatest error" in done.stdout, done.stderr
    right = out / file.name if place == "file" else file
    right.write_text(right.read_text().replace("1.01", "1.0"))
    done = script(made, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_override_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchtitan.config.override", reason="overrides came with torchtitan 0.3")
    prepare_triton()
    from tests.verify.feed_forward import capture

    file = tmp_path / "lib" / "broken_feed_forward.py"
    file.parent.mkdir()
    file.write_text(OVERRIDE.replace("FAULT", "1.01"))
    monkeypatch.syspath_prepend(str(file.parent))
    run = capture(tmp_path / "capture", fused=False, imports=[])
    verdict = execute(Request(op="broken_feed_forward.broken_swiglu", capture=str(run)))
    assert verdict.verdict == "FAIL"
    made = make_repro(verdict, out=tmp_path / "out", tensor="y", budget=30)
    assert made.after[0] < made.before[0]
    assert "Needs torch, torchtitan and broken_feed_forward;" in (made.folder / "repro.py").read_text()
    done = script(made, tmp_path)
    assert done.returncode == 1 and "y: greatest error" in done.stdout, done.stderr
    assert pytest_of(made) == 1
    file.write_text(OVERRIDE.replace("FAULT", "1.0"))
    done = script(made, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_case_on_which_the_kernel_raises(tmp_path: Path) -> None:
    kernel = tmp_path / "repro.py"  # A name that the script wants for itself.
    kernel.write_text(
        TWINS.replace("FAULT", "1.0").replace("NAMESPACE", "repro_twins_raise")
        + """
from bridge.verify import KernelSpec

def target(x, y):
    if x.shape[0] > 2:
        raise ValueError(f"no such grid: {x.shape}")
    return scaled_add(x, y)

OWN = KernelSpec(
    name="own", reference=lambda x, y: eager(x, y), target=target, inputs=("x", "y"), kind="elementwise",
    sample=lambda shape, dtype, generator, device: tuple(
        torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(2)
    ),
    grads=("x", "y"), shapes=((2, 3), (7, 4)), dtypes=("float32",),
)
"""
    )
    verdict = verify_kernel(kernel, quick=True)
    assert verdict.verdict == "FAIL"
    made = make_repro(verdict, out=tmp_path / "out", budget=40)
    assert made.after == ((3, 1), (3, 1))
    done = subprocess.run(
        [sys.executable, made.folder / "repro.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "raised ValueError: no such grid" in done.stdout
    assert pytest_of(made) == 1
    copy = made.folder / "kernel_repro.py"
    copy.write_text(copy.read_text().replace("> 2", "> 9"))
    assert pytest_of(made) == 0
