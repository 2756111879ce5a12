"""The demo's decoder for torchtitan 0.2.x, whose job files name a registered train spec.

`[experimental] custom_import = "bridge.demo.job_model"` in the job file imports this module, which
registers the model "bridge_demo" and the dataset "bridge_demo". The model is torchtitan's llama3
with every norm put in as OffsetRMSNorm on our Triton kernel (eager, with a warning, where it
cannot run).
"""

from __future__ import annotations

from pathlib import Path

import torch
from datasets import Dataset
from torch import nn
from torchtitan.components.loss import build_cross_entropy_loss
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import build_optimizers
from torchtitan.components.tokenizer import build_hf_tokenizer
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, build_text_dataloader
from torchtitan.models.llama3 import parallelize_llama
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec

from bridge.kernels.offset_rmsnorm.op import offset_rms_norm

ASSETS = Path(__file__).parent / "assets"


class OffsetRMSNorm(nn.Module):
    """`(1 + weight) * x * rsqrt(mean(x^2) + eps)` over the last axis, on the Triton kernel.

    Args:
        dim: columns of a row.
        eps: added to the mean square, inside the root.
    """

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., dim]` to `[..., dim]`, same dtype."""
        return offset_rms_norm(x, self.weight, eps=self.eps)


class OffsetDecoder(Transformer):  # type: ignore[misc]  # torchtitan is untyped here
    """torchtitan 0.2's llama3 with OffsetRMSNorm for each of its norms."""

    def __init__(self, model_args: TransformerModelArgs) -> None:
        super().__init__(model_args)
        for layer in self.layers.values():
            layer.attention_norm = OffsetRMSNorm(model_args.dim)
            layer.ffn_norm = OffsetRMSNorm(model_args.dim)
        self.norm = OffsetRMSNorm(model_args.dim)


def _load_text(path: str) -> Dataset:
    paragraphs = Path(path).read_text(encoding="utf-8").split("\n\n")
    return Dataset.from_list([{"text": " ".join(p.split())} for p in paragraphs if p.strip()])


DATASETS["bridge_demo"] = DatasetConfig(
    path=str(ASSETS / "text.txt"), loader=_load_text, sample_processor=lambda sample: sample["text"]
)

register_train_spec(
    "bridge_demo",
    TrainSpec(
        model_cls=OffsetDecoder,
        model_args={
            "small": TransformerModelArgs(dim=96, n_layers=2, n_heads=3, vocab_size=272, multiple_of=64),
            # Rows long and many enough for a GPU: 5120 columns is the width the kernel was written for.
            "wide": TransformerModelArgs(dim=5120, n_layers=2, n_heads=40, vocab_size=272, multiple_of=256),
        },
        parallelize_fn=parallelize_llama,
        pipelining_fn=None,
        build_optimizers_fn=build_optimizers,
        build_lr_schedulers_fn=build_lr_schedulers,
        build_dataloader_fn=build_text_dataloader,
        build_tokenizer_fn=build_hf_tokenizer,
        build_loss_fn=build_cross_entropy_loss,
    ),
)
