"""One captured torchtitan step, made by the real command line, shared by every test of a session."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

import bridge.demo

DEMO = Path(bridge.demo.__file__).parent


def bridge_command(
    *args: str | Path, cwd: Path, timeout: float = 240, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, one thread, interpreted Triton."""
    return subprocess.run(
        [sys.executable, "-m", "bridge", *map(str, args)],
        cwd=cwd,
        env=command_environment(**environment),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def command_environment(**more: str) -> dict[str, str]:
    """The environment such a process gets."""
    kept = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    }
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", **more}


def once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Any) -> Path:
    """Make a folder once for all workers of a session."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / f"shared-{name}"
    with FileLock(f"{shared}.lock"):
        if not shared.exists():
            half = shared.with_suffix(".half")
            shutil.rmtree(half, ignore_errors=True)
            half.mkdir(parents=True)
            make(half)
            half.rename(shared)
    return shared


@pytest.fixture(scope="session")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the demo's files and `capture/`: step 3 of the demo, its stdout and stderr beside it."""

    def make(folder: Path) -> None:
        for name in ("train.toml", "broken.toml", "broken_kernel.py"):
            shutil.copy(DEMO / name, folder)
        done = bridge_command("capture", "--step", "3", "--config", "train.toml", cwd=folder)
        (folder / "stdout").write_text(done.stdout, encoding="utf-8")
        (folder / "stderr").write_text(done.stderr, encoding="utf-8")
        assert done.returncode == 0, done.stderr

    return once(tmp_path_factory, "demo", make)
