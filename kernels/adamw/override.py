"""Put the Triton AdamW into a torchtitan run:

    override.imports = ["bridge.kernels.adamw.override.adamw"]

Optimizer checkpoints stay interchangeable with torch's AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import derive, override

from bridge.errors import UsageError
from bridge.kernels.adamw.optimizer import KernelAdamW


class KernelOptimizersContainer(OptimizersContainer):  # type: ignore[misc]  # torchtitan is untyped here
    """torchtitan's container, whose AdamW groups are stepped by `bridge::adamw_step`."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc]
        """The fields of torchtitan's config."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        if name == "AdamW":
            return KernelAdamW
        found: Callable[..., Any] = OptimizersContainer._resolve_optimizer_factory(name)
        return found


@override(target=OptimizersContainer.Config, exact=True, description="AdamW step in one Triton kernel.")
def adamw(config: OptimizersContainer.Config) -> KernelOptimizersContainer.Config:
    """Replace the optimizer container's config, keeping its fields.

    Raises:
        UsageError: no group uses AdamW, so the override would change nothing, or its states are to be bf16.
    """
    if not any(group.optimizer_name == "AdamW" for group in config.param_groups):
        raise UsageError("the adamw override needs a parameter group with AdamW, and this run has none")
    if config.implementation == "fused_opt_states_bf16":
        raise UsageError("the adamw override keeps moments in the dtype of the parameter, not in bf16")
    return derive(config, KernelOptimizersContainer.Config)
