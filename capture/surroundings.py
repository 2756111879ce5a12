"""What a trainer finds around it, arranged for the run and put back after it. Knows no torchtitan."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


@contextlib.contextmanager
def import_paths(config_path: str | None) -> Iterator[None]:
    """Let `module` and overrides be files beside the config or in the working folder.

    At the end of the path: a folder of the user's must not shadow an installed package.
    """
    folders = [str(Path.cwd())]
    if config_path is not None:
        folders.insert(0, str(Path(config_path).parent))
    added = [folder for folder in folders if folder not in sys.path]
    sys.path.extend(added)
    try:
        yield
    finally:
        for folder in added:
            sys.path.remove(folder)


@contextlib.contextmanager
def process_state() -> Iterator[None]:
    """Put back what a trainer sets for the whole process and never undoes."""
    collecting = gc.isenabled()
    threads = torch.autograd.is_multithreading_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    environment = dict(os.environ)
    try:
        yield
    finally:
        if collecting:
            gc.enable()
        torch.autograd.set_multithreading_enabled(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


@contextlib.contextmanager
def rendezvous() -> Iterator[None]:
    """Outside torchrun, be a job of one rank. The environment is restored by `process_state`."""
    if "RANK" not in os.environ:
        # Port 0: the store takes a free one itself. One that was looked up before may be gone by then.
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    yield


def cpu_module() -> ModuleType:
    """`torch.cpu` with the memory questions that a trainer asks of any device."""
    module = ModuleType("bridge.capture.cpu_device")
    module.__dict__.update(
        {name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("__")}
    )

    class Properties:
        name = "cpu"
        total_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    module.__dict__.update(
        get_device_name=lambda device=None: "cpu",
        get_device_properties=lambda device=None: Properties,
        current_device=lambda: 0,
        device_count=lambda: 1,
        set_device=lambda device: None,
        synchronize=lambda device=None: None,
        memory_stats=lambda device=None: _NoStatistics(),
        reset_peak_memory_stats=lambda device=None: None,
        empty_cache=lambda: None,
    )
    return module


class _NoStatistics(dict[str, int]):
    """Memory statistics of a device that keeps none: every counter is 0."""

    def get(self, key: str, default: Any = None) -> Any:
        """Whatever is asked for."""
        return 0

    def __missing__(self, key: str) -> int:
        return 0


@contextlib.contextmanager
def missing_upstream() -> Iterator[None]:
    """torchtitan 0.3.0 calls `torch.distributed.set_timeout`, which torch 2.13 does not have yet."""
    if hasattr(torch.distributed, "set_timeout"):
        yield
        return
    setattr(torch.distributed, "set_timeout", lambda timeout, group=None: None)  # noqa: B010
    try:
        yield
    finally:
        delattr(torch.distributed, "set_timeout")


class _PlainFormatter(logging.Formatter):
    """Without the colours that torchtitan writes into its messages, unless a terminal shows them."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
            return text
        return re.sub("\033\\[[0-9;]*m", "", text)


@contextlib.contextmanager
def run_log(verbose: bool) -> Iterator[None]:
    """torchtitan logs through the root logger; show it on stderr, errors only unless verbose.

    Warnings that torch and torchtitan raise about themselves are shown when verbose; others, such as an
    operator that falls back to eager, always are.
    """
    root = logging.getLogger()
    level = root.level
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_PlainFormatter("torchtitan: %(message)s"))
    handler.setLevel(logging.INFO if verbose else logging.ERROR)
    root.addHandler(handler)
    root.setLevel(logging.INFO if verbose else level)
    show = warnings.showwarning
    plain = (UserWarning, FutureWarning, DeprecationWarning)

    def show_others(message: Any, category: Any, filename: str, *rest: Any, **more: Any) -> None:
        if category in plain and any(
            f"/{name}/" in filename for name in ("torch", "torchtitan", "torchdata")
        ):
            return
        show(message, category, filename, *rest, **more)

    if not verbose:
        warnings.showwarning = show_others
    try:
        yield
    finally:
        warnings.showwarning = show
        root.removeHandler(handler)
        root.setLevel(level)


def plain_sums(parts: list[torch.nn.Module]) -> None:
    """Let FSDP scale gradients apart from their sum: gloo, the CPU's backend, has no scaled sum."""
    from torch.distributed.fsdp import FSDPModule

    for part in parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
