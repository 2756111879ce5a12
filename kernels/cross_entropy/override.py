"""Put the Triton cross-entropy into a torchtitan run:

    override.imports = ["bridge.kernels.cross_entropy.override.cross_entropy"]

The logits stay in the dtype the model gives them; torchtitan's own loss makes an fp32 copy of them first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss
from torchtitan.config import CompileConfig, derive, override

from bridge.errors import UsageError
from bridge.kernels._dispatch import Backend
from bridge.kernels.cross_entropy import op


class KernelCrossEntropyLoss(CrossEntropyLoss):  # type: ignore[misc]  # torchtitan is untyped here
    """torchtitan's summed cross-entropy computed by `bridge::cross_entropy`."""

    @dataclass(kw_only=True, slots=True)
    class Config(CrossEntropyLoss.Config):  # type: ignore[misc]
        """backend: "kernel" or "auto"; see `cross_entropy`."""

        backend: Backend = "kernel"

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None) -> None:
        super().__init__(config)
        self.fn = partial(_summed, backend=config.backend)
        self._maybe_compile(compile_config)


def _summed(
    pred: torch.Tensor, labels: torch.Tensor, *, backend: Backend, global_vocab_size: int | None = None
) -> torch.Tensor:
    """Sum over all tokens of `pred` `[batch, tokens, classes]` against `labels` `[batch, tokens]`."""
    if isinstance(pred, DTensor) or global_vocab_size not in (None, pred.shape[-1]):
        raise UsageError(
            "the cross_entropy override needs plain logits of the whole vocabulary, got a shard of them"
        )
    return op.cross_entropy(pred, labels, ignore_index=IGNORE_INDEX, reduction="sum", backend=backend)


@override(target=CrossEntropyLoss.Config, exact=True, description="Cross-entropy in Triton, in chunks.")
def cross_entropy(
    config: CrossEntropyLoss.Config, *, backend: Backend = "kernel"
) -> KernelCrossEntropyLoss.Config:
    """Replace the loss config, keeping its fields."""
    return derive(config, KernelCrossEntropyLoss.Config, backend=backend)
