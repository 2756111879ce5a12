"""Put the Triton SwiGLU, with gate and up projected in one product, into a torchtitan run:

    override.imports = ["bridge.kernels.fused_swiglu.override.fused_swiglu"]

A seed gives the weights that the stock block would have. Model checkpoints keep `w1.weight` and `w3.weight`
and stay interchangeable with the stock block and with the Hugging Face adapter. Optimizer states are kept for
the parameter `w13`, as the optimizer sees it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torchtitan.config import derive, override
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.sharding import ShardingConfig

from bridge.errors import UsageError
from bridge.kernels._dispatch import Backend
from bridge.kernels._sharding import pointwise
from bridge.kernels.fused_swiglu.feed_forward import gate_and_up, keep_two_weights_in_checkpoints
from bridge.kernels.fused_swiglu.op import swiglu


class KernelFeedForward(FeedForward):  # type: ignore[misc]  # torchtitan is untyped here
    """FeedForward whose activation is `bridge::swiglu`, with one weight `w13` `[hidden, 2, dim]`."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):  # type: ignore[misc]
        """backend: "kernel" or "auto"; see `swiglu`."""

        backend: Backend = "kernel"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.backend: Backend = config.backend
        del self.w1, self.w3
        self.w13 = torch.nn.Parameter(torch.empty(config.w1.out_features, 2, config.w1.in_features))
        self._halves = (config.w1, config.w3)
        keep_two_weights_in_checkpoints(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`w2(silu(w1 x) * w3 x)` for `x` `[..., dim]`."""
        gate, up = gate_and_up(x, self.w13)
        return self.w2(pointwise(partial(swiglu, backend=self.backend), gate, up))

    def init_states(self, **options: Any) -> None:
        """Initialise in the stock block's order, w1, w2, w3, so that a seed gives the same weights."""
        self._init_half(0)
        super().init_states(**options)

    def _init_self_parameters(self) -> None:
        self._init_half(1)

    @torch.no_grad()
    def _init_half(self, half: int) -> None:
        """Give the gate (0) or the up half (1) what the stock block's linear of its own would have drawn."""
        with torch.device("meta"):
            linear = self._halves[half].build()
        place = self.w13[:, half]
        # Contiguous: random numbers fill a strided view in another order.
        linear.weight = torch.nn.Parameter(torch.empty_like(place, memory_format=torch.contiguous_format))
        linear.init_states()
        place.copy_(linear.weight)


@override(target=FeedForward.Config, exact=True, description="SwiGLU in Triton; gate and up in one product.")
def fused_swiglu(config: FeedForward.Config, *, backend: Backend = "kernel") -> KernelFeedForward.Config:
    """Replace one FeedForward config, keeping its fields.

    Raises:
        UsageError: w1 and w3 are no plain linears, differ in size or have a bias, so they cannot be one
            weight.
    """
    w1, w3 = config.w1, config.w3
    for name, linear in (("w1", w1), ("w3", w3)):
        if type(linear) is not Linear.Config:
            raise UsageError(
                f"the fused_swiglu override needs plain Linear for w1 and w3, and {name} is a "
                f"{type(linear)._owner.__name__}; leave out one of the two"
            )
    if w1.bias or w3.bias or (w1.in_features, w1.out_features) != (w3.in_features, w3.out_features):
        raise UsageError(
            f"the fused_swiglu override needs w1 and w3 of one size without bias, got "
            f"{w1.in_features}x{w1.out_features} (bias {w1.bias}) and "
            f"{w3.in_features}x{w3.out_features} (bias {w3.bias})"
        )
    return derive(config, KernelFeedForward.Config, backend=backend, sharding_config=_sharding(config))


def _sharding(config: FeedForward.Config) -> Any:
    """The block's own sharding, with `w13` laid out along its first axis as w1's weight is."""
    own = config.sharding_config
    of_w1 = config.w1.sharding_config
    weight = of_w1.state_shardings.get("weight") if of_w1 is not None else None
    if weight is None:
        return own
    return ShardingConfig(
        state_shardings={"w13": weight},
        in_src_shardings=own.in_src_shardings if own is not None else None,
        in_dst_shardings=own.in_dst_shardings if own is not None else None,
    )
