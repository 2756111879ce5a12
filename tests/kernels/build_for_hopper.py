"""Compile every kernel that the built-in targets launch for sm_90, launching none; prints the kernels' names.

Run by test_ops.py in a process of its own, because it replaces Triton's driver.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from bridge.kernels import _dispatch
from bridge.verify.registry import built_in_names


class _Hopper:
    """As much of a driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def main() -> None:
    """Run each target on CPU tensors with launching replaced by building."""
    driver.set_active(_Hopper())
    launch = JITFunction.run

    def build(self: Any, *args: Any, grid: Any, **kwargs: Any) -> Any:
        kwargs["warmup"] = True
        launch(self, *args, grid=grid, **kwargs)
        print(self.__name__)

    JITFunction.run = build
    # The operators would refuse CPU tensors; here nothing is launched on them. Set before they are imported.
    setattr(_dispatch, "unsupported", lambda *tensors, missing, **_: missing)  # noqa: B010
    for name in built_in_names():
        spec = importlib.import_module(f"bridge.kernels.{name}.spec").SPEC
        for dtype in (torch.bfloat16, torch.float32):
            inputs = spec.sample(spec.shapes[0], dtype, torch.Generator().manual_seed(0), "cpu")
            leaves = [tensor.detach() for tensor in inputs]
            for grad in spec.grads:
                leaves[spec.inputs.index(grad)].requires_grad_()
            result = spec.target(*leaves, **spec.attrs)
            outputs = result if isinstance(result, tuple) else (result,)
            if spec.grads:
                torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])


main()
