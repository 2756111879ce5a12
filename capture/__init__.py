"""Inside the training process: see a step's calls, digest and store their tensors.

Importing loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridge.capture.api import capture_run
    from bridge.capture.store import Capture, load_capture
    from bridge.capture.tracer import Tracer

__all__ = ["Capture", "Tracer", "capture_run", "load_capture"]

_HOMES = {"capture_run": "api", "Capture": "store", "load_capture": "store", "Tracer": "tracer"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"bridge.capture.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'bridge.capture' has no attribute {name!r}")
