"""The torchtitan overrides: applied by torchtitan, state dict unchanged, results of the eager module."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

titan = pytest.importorskip(
    "torchtitan.config.override", reason="torchtitan here has no overrides (needs 0.3)"
)

from torchtitan.protocols.module import Module  # noqa: E402

from bridge.kernels.offset_rmsnorm.module import OffsetRMSNorm  # noqa: E402


class Holder(Module):
    """A module with one child, so that the child's config has a place to be replaced in."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        child: Any

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.child = config.child.build()


def swap(config: Any, entry: Any) -> tuple[Any, Any]:
    """Build `config` as it is and with the override `entry` applied; both with the same state."""
    plain = Holder.Config(child=config).build()
    plain.init_states()
    root = Holder.Config(child=config)
    titan.apply_overrides(titan.OverrideConfig(imports=[entry]), root)
    replaced = root.build()
    replaced.load_state_dict(plain.state_dict(), strict=True)
    assert list(plain.state_dict()) == list(replaced.state_dict())
    return plain.child, replaced.child


OFFSET = "bridge.kernels.offset_rmsnorm.override.offset_rmsnorm"


def test_offset_rmsnorm(gate: SimpleNamespace) -> None:
    plain, kernel = swap(OffsetRMSNorm.Config(dim=40, eps=1e-5), OFFSET)
    assert type(kernel).__name__ == "KernelOffsetRMSNorm" and kernel.eps == 1e-5
    x = torch.randn(2, 3, 40, device=gate.device)
    for module in (plain, kernel):
        module.to(gate.device)
        torch.nn.init.normal_(module.weight, generator=torch.Generator(device=gate.device).manual_seed(1))
    torch.testing.assert_close(kernel(x), plain(x), rtol=1e-6, atol=1e-6)


def test_the_backend_can_be_given() -> None:
    _, kernel = swap(OffsetRMSNorm.Config(dim=8), (OFFSET, {"backend": "auto"}))
    assert kernel.backend == "auto"


def test_sharded_activations_and_weights(tmp_path: Path) -> None:
    """Two ranks, rows sharded: outputs and the reduced weight gradient equal the single-process ones."""
    script = Path(__file__).with_name("sharded_norm.py")
    ranks = []
    for rank in range(2):
        env = os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "STORE": str(tmp_path / "store")}
        ranks.append(
            subprocess.Popen([sys.executable, str(script)], env=env, stderr=subprocess.PIPE, text=True)
        )
    for process in ranks:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors[-2000:]
