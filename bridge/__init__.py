"""numerics-bridge: from a diverging training step to a verdict on the kernel in it.

`import bridge` is cheap: torch is loaded by the first call that needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridge._version import __version__

if TYPE_CHECKING:
    from bridge.capture.store import load_capture

__all__ = ["__version__", "load_capture"]


def __getattr__(name: str) -> Any:
    if name == "load_capture":
        from bridge.capture.store import load_capture

        return load_capture
    raise AttributeError(f"module 'bridge' has no attribute {name!r}")
