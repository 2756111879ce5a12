"""Tensors in, verdict out. Importing this package loads neither torch nor a kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridge.verify.spec import KernelSpec

if TYPE_CHECKING:
    from bridge.verify.api import verify_kernel
    from bridge.verify.verdict import Verdict

__all__ = ["KernelSpec", "Verdict", "verify_kernel"]


def __getattr__(name: str) -> Any:
    if name == "verify_kernel":
        from bridge.verify.api import verify_kernel

        return verify_kernel
    if name == "Verdict":
        from bridge.verify.verdict import Verdict

        return Verdict
    raise AttributeError(f"module 'bridge.verify' has no attribute {name!r}")
