"""What is imported before the fork leaves the kernel's module free to choose."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU no kernel is interpreted")
def test_kernels_can_still_be_interpreted() -> None:
    """Dynamo imports triton, which decides at its import whether kernels are interpreted."""
    code = "from bridge.verify import nursery, registry; nursery.preload(); registry.prepare_triton()"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
