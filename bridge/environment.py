"""Versions and devices of this machine, as every file we write records them."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata

from bridge._version import __version__

PACKAGES = ("torch", "triton", "torchtitan", "numpy", "safetensors", "plotly", "click", "msgspec")


def package_versions() -> dict[str, str]:
    """Version of each package that matters, without importing it; a missing one is left out."""
    found = {"bridge": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def device_name() -> str:
    """ "NVIDIA H200" or the processor's architecture; imports torch."""
    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"


def describe_environment() -> dict[str, str]:
    """What `bridge env` prints: versions, device and the switches that change numerics."""
    facts = package_versions()
    facts["platform"] = platform.platform()
    facts["executable"] = sys.executable
    try:
        facts["device"] = device_name()
    except ImportError:
        facts["device"] = "unknown (torch is not installed)"
    for name in ("TRITON_INTERPRET", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE"):
        if name in os.environ:
            facts[name] = os.environ[name]
    return facts
