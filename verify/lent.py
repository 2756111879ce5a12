"""An override that asks for a GPU, run as it is where Triton is interpreted.

Overrides register their ops for CUDA alone and look at `is_cuda` before they call them. Interpreted kernels
run on CPU tensors, so on a machine without a GPU both are answered for those. The override stays unmodified.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bridge.verify import registry

_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]


def lent() -> bool:
    """Whether kernels run on the CPU here, for want of a GPU."""
    return not torch.cuda.is_available() and registry.interpreting()


def lend_to_cpu() -> None:
    """Let custom ops that name CUDA as their only device run interpreted on a machine without one."""
    if not lent():
        return
    from torch._library.custom_ops import OPDEFS

    for op in list(OPDEFS.values()):
        made_for = op._backend_fns
        if set(made_for) == {"cuda"}:
            op.register_kernel("cpu")(made_for["cuda"])


def asking(file: Path | None) -> AbstractContextManager[Any]:
    """While it lasts, code in `file` that asks a tensor for `is_cuda` is told yes; nothing on a GPU."""
    return _Yes(str(file)) if file is not None and lent() else nullcontext()


class _Yes(TorchFunctionMode):
    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Only the override's own file: torch and Triton need the truth.
        if func == _IS_CUDA and sys._getframe(1).f_code.co_filename == self.file:
            return True
        return func(*args, **(kwargs or {}))
