"""Every built-in is a proper torch op: opcheck, torch.compile(fullgraph=True), and it builds for sm_90."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bridge.verify.registry import built_in_names, load_spec

NAMES = built_in_names()


class _Recorder(TorchDispatchMode):
    """Keeps the calls of our own ops with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "bridge":
            saved = [arg.detach().clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
            self.calls.append((func, tuple(saved)))
        return func(*args, **(kwargs or {}))


def _drawn(
    gate: SimpleNamespace, spec: Any, dtype: torch.dtype
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    shape = min(spec.shapes, key=lambda shape: abs(torch.Size(shape).numel() - 600))
    inputs = list(gate.draw(spec, shape, dtype, seed=7))
    outputs = gate.run(spec.reference, inputs, (), (), **spec.attrs)[0]
    generator = torch.Generator().manual_seed(9)
    return inputs, [torch.randn(o.shape, generator=generator).to(o.device, o.dtype) for o in outputs]


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(gate: SimpleNamespace, name: str) -> None:
    spec = load_spec(name).spec
    inputs, grads = _drawn(gate, spec, torch.float32)
    wrt = [spec.inputs.index(grad) for grad in spec.grads]
    with _Recorder() as recorder:
        gate.run(spec.target, inputs, grads, wrt, **spec.attrs)
    assert len(recorder.calls) >= (2 if spec.grads else 1), "the target ran no op of ours"
    for position, (op, args) in enumerate(recorder.calls):
        if position == 0 and spec.grads:
            args = tuple(
                arg.requires_grad_() if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg
                for arg in args
            )
        torch.library.opcheck(op, args)


@pytest.mark.parametrize("name", NAMES)
def test_compile_fullgraph(gate: SimpleNamespace, name: str) -> None:
    """One graph, same bits as eager. Without a GPU the graph runs op by op."""
    spec = load_spec(name).spec
    inputs, grads = _drawn(gate, spec, torch.float16)
    wrt = [spec.inputs.index(grad) for grad in spec.grads]
    backend = "inductor" if gate.device == "cuda" else "aot_eager"
    compiled = torch.compile(spec.target, fullgraph=True, backend=backend)
    eager = gate.run(spec.target, inputs, grads, wrt, **spec.attrs)
    traced = gate.run(compiled, inputs, grads, wrt, **spec.attrs)
    for one, two in zip(eager[0] + eager[1], traced[0] + traced[1], strict=True):
        assert torch.equal(one, two)


def test_builds_for_hopper_without_a_gpu(tmp_path: Path) -> None:
    """Everything the interpreter accepts must also compile: each launch of each target is built for sm_90."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    script = Path(__file__).with_name("build_for_hopper.py")
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    built = set(done.stdout.split())
    for name in NAMES:
        expected = {site for site in load_spec(name).spec.sites if site.endswith("_kernel")}
        assert expected, f"{name} names no Triton kernel in its sites"
        assert expected <= built, f"{name}: {expected - built} were not built"
