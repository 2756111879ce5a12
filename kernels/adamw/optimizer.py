"""`torch.optim.AdamW` with its step in one Triton kernel; state dicts are interchangeable with torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from bridge.errors import UsageError
from bridge.kernels._dispatch import Backend
from bridge.kernels.adamw.op import adamw_step

#: Options of torch's AdamW that change what a step computes.
OTHER_RESULTS = ("amsgrad", "maximize")


class KernelAdamW(torch.optim.AdamW):
    """AdamW computed by `bridge::adamw_step`, one launch a parameter.

    Args:
        params: parameters or groups, as `torch.optim.AdamW` takes them.
        arguments, options: those of `torch.optim.AdamW`. `fused` and `foreach` say how, not what, and are
            ignored; `capturable` and `differentiable` are errors.
        backend: "kernel" or "auto"; see `adamw_step`.

    Raises:
        UsageError: a group, given now, added later or loaded, asks for what this step does not do.
    """

    def __init__(
        self, params: Iterable[Any], *arguments: Any, backend: Backend = "kernel", **options: Any
    ) -> None:
        self.backend: Backend = backend
        super().__init__(params, *arguments, **options | {"fused": None, "foreach": None})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own."""
        _refuse(self.defaults | param_group, (*OTHER_RESULTS, "capturable", "differentiable"))
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "backend": self.backend}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for group in self.param_groups:
            _refuse(group, OTHER_RESULTS)

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
                grad = _placed_like(param.grad, param)
                adamw_step(
                    *(_local(t) for t in (param, grad, state["exp_avg"], state["exp_avg_sq"])),
                    lr=float(group["lr"]),
                    beta1=beta1,
                    beta2=beta2,
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    step=int(state["step"]),
                    backend=self.backend,
                )
        return loss


def _refuse(group: dict[str, Any], names: Iterable[str]) -> None:
    for name in names:
        if group.get(name):
            raise UsageError(f"KernelAdamW has no {name}; leave it out or use torch.optim.AdamW")


def _placed_like(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """A DTensor gradient with the placements of its parameter: partial sums, say, are added up."""
    wanted = getattr(param, "placements", None)
    redistribute = getattr(grad, "redistribute", None)
    return grad if wanted is None or redistribute is None else redistribute(placements=wanted)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The shard of a DTensor: the step is elementwise, so every rank updates its own part."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor
