"""`torch.optim.AdamW` with its step in one Triton kernel; state dicts are interchangeable with torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from bridge.errors import UsageError
from bridge.kernels._dispatch import Backend
from bridge.kernels.adamw.op import adamw_step


class KernelAdamW(torch.optim.AdamW):
    """AdamW computed by `bridge::adamw_step`, one launch a parameter.

    Args:
        params: parameters or groups, as `torch.optim.AdamW` takes them.
        backend: "kernel" or "auto"; see `adamw_step`.
        options: those of `torch.optim.AdamW`. `fused` and `foreach` say how, not what, and are ignored;
            `amsgrad`, `maximize`, `capturable` and `differentiable` are errors.
    """

    def __init__(self, params: Iterable[Any], *, backend: Backend = "kernel", **options: Any) -> None:
        self.backend: Backend = backend
        options |= {"fused": None, "foreach": None}
        super().__init__(params, **options)
        for group in self.param_groups:
            for name in ("amsgrad", "maximize", "capturable", "differentiable"):
                if group.get(name):
                    raise UsageError(f"KernelAdamW has no {name}; leave it out or use torch.optim.AdamW")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; returns what `closure`, if any, returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
                    state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
                state["step"] += 1
                adamw_step(
                    *(_local(t) for t in (param, param.grad, state["exp_avg"], state["exp_avg_sq"])),
                    lr=float(group["lr"]),
                    beta1=beta1,
                    beta2=beta2,
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    step=int(state["step"]),
                    backend=self.backend,
                )
        return loss


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The shard of a DTensor: the step is elementwise, so every rank updates its own part."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor
