"""torchtitan configs of bench_localisation: the demo's decoder on data that any number of ranks share."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models import qwen3
from torchtitan.models.common import CosSinRoPE
from torchtitan.models.qwen3.config_registry import qwen3_debugmodel

from bridge.demo.config_registry import VOCABULARY, offset_decoder

#: One document fills one sequence: 47 bytes, begin and end of text, shifted by one to 48 tokens. With as many
#: documents as sequences in the global batch, one rank with both and two ranks with one each see the same.
DOCUMENTS = (
    "A sum taken in another order is another number.",
    "Two ranks add what one rank had added by itself",
)

DATASETS["bridge_localisation"] = DatasetConfig(
    path="documents",
    loader=lambda path: Dataset.from_list([{"text": text} for text in DOCUMENTS]),
    sample_processor=lambda sample: sample["text"],
)


def shared_batch() -> Any:
    """The demo's decoder on `DOCUMENTS`, one document a sequence."""
    config = offset_decoder()
    config.dataloader.dataset = "bridge_localisation"
    return config


def held_out() -> Any:
    """A small qwen3 of torchtitan's in bfloat16: not the demo's modules, width or dtype."""
    config = qwen3_debugmodel()
    demo = offset_decoder()
    model = config.model_spec.model
    dim, head = 128, 32
    model.dim, model.vocab_size = dim, VOCABULARY
    model.norm = qwen3._qwen3_norm(dim)
    model.tok_embeddings.num_embeddings, model.tok_embeddings.embedding_dim = VOCABULARY, dim
    model.lm_head.in_features, model.lm_head.out_features = dim, VOCABULARY
    model.layers = qwen3._build_qwen3_layers(
        fuse_qkv=True, n_layers=2, dim=dim, n_heads=4, n_kv_heads=2, head_dim=head, hidden_dim=384,
        attn_backend="flex", rope=CosSinRoPE.Config(dim=head, max_seq_len=256, theta=1e6),
    )  # fmt: skip
    config.loss = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)
    config.hf_assets_path, config.dataloader = demo.hf_assets_path, demo.dataloader
    for name in ("parallelism", "comm", "debug", "activation_checkpoint"):
        setattr(config, name, getattr(demo, name))
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 1, 64, 100
    config.training.mixed_precision_param = "bfloat16"
    return config
