"""The wheel holds exactly the tree: one top-level name, and no module left out of `packages`."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HOMES = {"bridge": "bridge"} | {name: f"bridge/{name}" for name in ("capture", "verify", "kernels")}


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names of all files in a wheel built from the tracked tree."""
    out = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "-q", "-w", str(out)]
    build = [sys.executable, "-m", "pip", "wheel", *options, "."]
    copy = tmp_path_factory.mktemp("tree")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in tracked.decode().split("\0"):
        if name and (ROOT / name).is_file():
            target = copy / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    subprocess.run(build, cwd=copy, check=True, capture_output=True)
    (wheel,) = out.glob("*.whl")
    return zipfile.ZipFile(wheel).namelist()


def test_wheel_installs_one_name(wheel_names: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"bridge"}


def test_wheel_has_every_module_of_the_tree(wheel_names: list[str]) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", *HOMES], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout.split()
    expected = {
        "/".join([HOMES[name.split("/")[0]], *name.split("/")[1:]])
        for name in tracked
        if (ROOT / name).is_file()
    }
    packed = {name for name in wheel_names if name.startswith("bridge/")}
    assert packed == expected


def test_import_is_inert() -> None:
    """`bridge --help` and the packages load no torch, no plotly, no triton."""
    code = (
        "import sys, bridge, bridge.cli, bridge.verify, bridge.capture, bridge.kernels, bridge.report, "
        "bridge.pytest_plugin, bridge.testing\n"
        "bridge.cli.run(['--help'])\n"
        "heavy = {'torch', 'triton', 'plotly', 'torchtitan', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_version_is_one() -> None:
    from importlib.metadata import version

    import bridge

    assert version("numerics-bridge") == bridge.__version__
