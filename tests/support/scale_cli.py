"""A kernel file for tests of `bridge verify` on the command line, and what they ask of every run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bridge import cli

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
