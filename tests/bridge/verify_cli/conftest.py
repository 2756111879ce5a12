"""A captured run, a kernel file and a folder of their own for tests of `bridge verify`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from scale_cli import KERNEL

from bridge.capture import Tracer
from bridge.capture.select import Selection


class Scaled(torch.nn.Module):
    """The eager module that the kernel replaces."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(columns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A captured step of two Scaled modules."""
    out = tmp_path_factory.mktemp("run") / "capture"
    torch.manual_seed(0)
    model = torch.nn.Sequential(Scaled(8), torch.nn.Linear(8, 6), Scaled(6))
    tracer = Tracer(model, out=out, step=7, selection=Selection(patterns=("Scaled",)))
    with tracer:
        model(torch.randn(5, 8)).square().sum().backward()
    tracer.finish(metrics={"loss": 1.0})
    return out


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    path = tmp_path / "scale.py"
    path.write_text(KERNEL)
    return path


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Reports go to the current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
