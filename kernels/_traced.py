"""The fallback warning in a form that torch.compile(fullgraph=True) accepts. Imports torch._dynamo."""

from __future__ import annotations

import torch

from bridge.kernels._dispatch import warn_fallback


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def warn_fallback_once(name: str, reason: str) -> bool:
    """Warn while the graph is traced; returns a constant, since a traced call must have a value."""
    warn_fallback(name, reason)
    return True
