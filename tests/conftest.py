"""What every test shares: Triton's interpreter where there is no GPU, and why a GPU test is skipped."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

# A shell's background job starts with Ctrl-C ignored, one under nohup with SIGHUP, and every child would
# inherit that: tests that interrupt a command would wait for ever.
if threading.current_thread() is threading.main_thread():
    for _number, _handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(_number) is signal.SIG_IGN:
            signal.signal(_number, _handler)

# Triton reads this once, on import, so it is decided before any test module is.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` on a machine without CUDA."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, this machine has none"))
