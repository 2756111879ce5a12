"""A captured step of torchtitan's feed-forward, stock or replaced by its fused override."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from bridge.capture import Tracer
from bridge.capture.select import Selection


def feed_forward_config() -> Any:
    from torchtitan.models.common import Linear
    from torchtitan.models.common.feed_forward import FeedForward

    return FeedForward.Config(
        w1=Linear.Config(in_features=16, out_features=24),
        w2=Linear.Config(in_features=24, out_features=16),
        w3=Linear.Config(in_features=16, out_features=24),
    )


def capture(out: Path, *, fused: bool, imports: list[str]) -> Path:
    """A captured step of one feed-forward, stock or replaced."""
    from bridge.verify.lent import lend_to_cpu

    config = feed_forward_config()
    made = (
        importlib.import_module("torchtitan.overrides.fused_swiglu").fused_swiglu(config) if fused else config
    )
    lend_to_cpu()
    torch.manual_seed(0)
    layer = torch.nn.Module()
    layer.feed_forward = made.build()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([layer])
    manifest = {
        "model_spec": {"model": {"layers": [{"feed_forward": config.to_dict()}]}},
        "override": {"imports": imports},
    }
    name = type(layer.feed_forward).__name__
    tracer = Tracer(model, out=out, step=5, selection=Selection(patterns=(name,)), config=manifest)
    with tracer:
        layer.feed_forward(torch.randn(2, 5, 16)).square().sum().backward()
    tracer.finish()
    return out
