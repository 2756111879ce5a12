"""A small decoder-like model and what captures of it need."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bridge.capture.select import Selection
from bridge.capture.store import Capture, load_capture
from bridge.capture.tracer import Tracer


class Norm(nn.Module):
    """Eager OffsetRMSNorm: uses its input twice, so gradient accumulation order matters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.eps = 1e-6
        self.weight = nn.Parameter(0.1 * torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (1 + self.weight) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = Norm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = Norm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.embedding.weight.t()


class Trainer:
    """A model with an optimizer and fixed data; `step()` trains once and returns the loss."""

    def __init__(self, model: nn.Module | None = None, **adamw: Any) -> None:
        torch.manual_seed(7)
        self.model = model if model is not None else Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, **adamw)
        self.tokens = torch.randint(0, 32, (2, 9))

    def loss(self) -> torch.Tensor:
        logits = self.model(self.tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())

    def step(self) -> float:
        loss = self.loss()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def trainer() -> Trainer:
    torch.manual_seed(3)
    return Trainer(Net())


@pytest.fixture
def capture_of(tmp_path: Path) -> Callable[..., Capture]:
    """Capture one run of a function: `capture_of(model, step, patterns=("*",))`."""
    count = 0

    def capture(
        model: Any, action: Callable[[], Any], *, patterns: tuple[str, ...] = ("*",), **more: Any
    ) -> Capture:
        nonlocal count
        count += 1
        selection = Selection(patterns=patterns, **{k: more.pop(k) for k in ("which", "phases") if k in more})
        tracer = Tracer(model, out=tmp_path / f"capture{count}", step=1, selection=selection, **more)
        with tracer:
            action()
        return load_capture(tracer.finish())

    return capture


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A file system of two megabytes, where one can be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    made = mount and os.getuid() == 0
    if (
        not made
        or subprocess.run([mount, "-t", "tmpfs", "-o", "size=2m", "tmpfs", place], check=False).returncode
    ):
        pytest.skip("needs the right to mount a tmpfs")
    yield place
    subprocess.run(["umount", "-l", place], check=False)
