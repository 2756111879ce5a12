"""torchtitan config registry of the demo: a small decoder whose norms are OffsetRMSNorm.

The model is torchtitan's own decoder (Trainer, attention, feed-forward, loss, optimizer,
dataloader); only its norms differ, `(1 + weight) * x * rsqrt(mean(x^2) + eps)`. It is small enough
to train on two CPU cores with Triton's interpreter, where one program costs about a millisecond.
The tokenizer (one token a byte) and the text lie in `assets/`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch.nn as nn
from datasets import Dataset
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import CommConfig, DebugConfig
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.common import ComplexRoPE, Embedding, Linear
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.llama3 import parallelize_llama
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from bridge.kernels.offset_rmsnorm.module import OffsetRMSNorm

ASSETS = Path(__file__).parent / "assets"

#: 96 is no power of two, so the kernel's column mask is at work on every row.
DIM = 96
HEADS = 3
LAYERS = 2
#: 256 bytes, begin and end of text, rounded up.
VOCABULARY = 272


def _load_text(path: str) -> Dataset:
    """One sample per paragraph of a text file."""
    paragraphs = Path(path).read_text(encoding="utf-8").split("\n\n")
    return Dataset.from_list([{"text": " ".join(p.split())} for p in paragraphs if p.strip()])


def _text_of(sample: dict[str, str]) -> str:
    return sample["text"]


DATASETS["bridge_demo"] = DatasetConfig(
    path=str(ASSETS / "text.txt"), loader=_load_text, sample_processor=_text_of
)


def _linear(std: float) -> dict[str, Any]:
    return {"weight": partial(nn.init.trunc_normal_, std=std), "bias": partial(nn.init.zeros_)}


def _norm() -> OffsetRMSNorm.Config:
    # Weights start away from zero, so that a kernel which forgets the `1 +` or the weight shows at once.
    return OffsetRMSNorm.Config(dim=DIM, param_init={"weight": partial(nn.init.normal_, std=0.1)})


def _block() -> Llama3TransformerBlock.Config:
    return Llama3TransformerBlock.Config(
        attention_norm=_norm(),
        ffn_norm=_norm(),
        attention=make_gqa_config(
            dim=DIM,
            n_heads=HEADS,
            wqkv_param_init=_linear(0.05),
            wo_param_init=_linear(0.03),
            # Runs forward and backward on a CPU too, unlike FlexAttention.
            inner_attention=ScaledDotProductAttention.Config(),
            rope=ComplexRoPE.Config(dim=DIM // HEADS, max_seq_len=1024, theta=10000),
        ),
        feed_forward=make_ffn_config(
            dim=DIM, hidden_dim=2 * DIM, w1_param_init=_linear(0.05), w2w3_param_init=_linear(0.03)
        ),
    )


def _model() -> Llama3Model.Config:
    return Llama3Model.Config(
        dim=DIM,
        vocab_size=VOCABULARY,
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCABULARY,
            embedding_dim=DIM,
            param_init={"weight": partial(nn.init.normal_, std=0.5)},
        ),
        norm=_norm(),
        lm_head=Linear.Config(in_features=DIM, out_features=VOCABULARY, param_init=_linear(DIM**-0.5)),
        layers=[_block() for _ in range(LAYERS)],
    )


def offset_decoder() -> Trainer.Config:
    """Two layers of width 96, fp32, batch 1 x 48 bytes, AdamW; seeded, so runs repeat bit for bit."""
    return Trainer.Config(
        model_spec=ModelSpec(
            name="bridge_demo",
            flavor="offset_decoder",
            model=_model(),
            parallelize_fn=parallelize_llama,
            pipelining_fn=None,
            post_optimizer_build_fn=None,
            state_dict_adapter=None,
        ),
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        hf_assets_path=str(ASSETS),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="bridge_demo"),
        optimizer=default_adamw(lr=3e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=10),
        training=TrainingConfig(
            local_batch_size=1,
            seq_len=48,
            steps=100,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        metrics=MetricsProcessor.Config(log_freq=10),
        # The default backend wants a newer FSDP than torch 2.13's as soon as there are two ranks.
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        comm=CommConfig(trace_buf_size=0),
        debug=DebugConfig(seed=0, deterministic=True, enable_structured_logging=False),
        activation_checkpoint=None,
    )
