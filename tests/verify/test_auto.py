"""torchtitan overrides judged without a spec, on calls of the stock module and of the replacement."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from bridge.capture import Tracer, load_capture
from bridge.capture.select import Selection
from bridge.errors import BridgeError, UsageError
from bridge.verify.request import Request
from bridge.verify.session import execute
from tests.verify.feed_forward import capture, feed_forward_config

pytest.importorskip("torchtitan.config.override", reason="overrides came with torchtitan 0.3")

FUSED = "torchtitan.overrides.fused_swiglu.fused_swiglu"


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> None:
    """The override's module imports triton."""
    from bridge.verify.registry import prepare_triton

    prepare_triton()


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return capture(tmp_path_factory.mktemp("stock") / "capture", fused=False, imports=[])


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if torch.cuda.is_available():
        pytest.skip("captured on the CPU; tests marked gpu run torchtitan itself")
    return capture(tmp_path_factory.mktemp("fused") / "capture", fused=True, imports=[FUSED])


def test_the_baseline_run_judges_the_kernel(stock: Path) -> None:
    verdict = execute(Request(op=FUSED, capture=str(stock)))
    assert verdict.verdict == "PASS"
    assert {entry.tensor for entry in verdict.tensors} == {
        "y", "grad_x", "grad_w1.weight", "grad_w2.weight", "grad_w3.weight",
    }  # fmt: skip
    assert "torchtitan::silu_and_mul" in verdict.fidelity.kernels
    assert verdict.provenance.kernel_file is not None and verdict.provenance.kernel_file.endswith(
        "fused_swiglu.py"
    )
    assert any("an override has no spec" in text for text in verdict.coverage.not_covered)


def test_the_run_with_the_kernel_is_replayed_bit_for_bit(fused: Path) -> None:
    # A captured module site names the override by itself.
    verdict = execute(Request(op="FusedSwiGLU", capture=str(fused)))
    assert (verdict.verdict, verdict.op) == ("PASS", FUSED)
    assert verdict.fidelity.status == "bit-equal"


def test_a_wrong_override_fails(stock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    module = importlib.import_module("torchtitan.overrides.fused_swiglu")
    right = module.FusedSwiGLU.forward
    monkeypatch.setattr(module.FusedSwiGLU, "forward", lambda self, x: right(self, x) * 1.001)
    verdict = execute(Request(op=FUSED, capture=str(stock)))
    assert verdict.verdict == "FAIL" and "y" in {e.tensor for e in verdict.tensors if e.verdict == "FAIL"}


GATED = """
from dataclasses import dataclass
import torch
from torchtitan.config import derive, override
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.overrides.fused_swiglu import silu_and_mul_op

class Gated(FeedForward):
    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        pass

    def forward(self, x):
        if not x.is_cuda:
            return super().forward(x)
        rows = x.flatten(0, -2)
        return self.w2(silu_and_mul_op(self.w1(rows), self.w3(rows))).view(x.shape)

@override(target=FeedForward.Config, description="runs its kernel on CUDA alone")
def gated(config):
    return derive(config, Gated.Config)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the question is answered truly where there is a GPU")
def test_an_override_that_wants_cuda_tensors_runs_interpreted(
    stock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gated_override.py").write_text(GATED, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    verdict = execute(Request(op="gated_override.gated", capture=str(stock)))
    assert verdict.verdict == "PASS", verdict.summary
    assert "torchtitan::silu_and_mul" in verdict.fidelity.kernels
    # Nobody else is told so, nor is the file once the target has run.
    assert not torch.ones(1).is_cuda


@pytest.mark.skipif(torch.cuda.is_available(), reason="captured on the CPU")
def test_a_module_of_other_modules_is_built_as_the_run_built_it(tmp_path: Path) -> None:
    """Fields whose type names a base class, None between the arguments, a view that is rotated in place."""
    from torchtitan.models.common import ComplexRoPE, Linear
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.nn_modules import RMSNorm
    from torchtitan.models.deepseek_v3.model import Attention

    def linear(inputs: int, outputs: int) -> Any:
        return Linear.Config(in_features=inputs, out_features=outputs)

    config = Attention.Config(
        n_heads=2, dim=12, kv_lora_rank=6, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
        wq=linear(12, 24), wkv_a=linear(12, 10), wkv_b=linear(6, 32), wo=linear(16, 12),
        q_norm=RMSNorm.Config(normalized_shape=1), kv_norm=RMSNorm.Config(normalized_shape=6),
        rope=ComplexRoPE.Config(dim=4, max_seq_len=16), inner_attention=ScaledDotProductAttention.Config(),
    )  # fmt: skip
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.attention = config.build()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tracer = Tracer(
        model,
        out=tmp_path / "mla",
        step=1,
        selection=Selection(patterns=("Attention",)),
        config={"model_spec": {"model": {"attention": config.to_dict()}}},
    )
    with tracer:
        model.attention(torch.randn(1, 5, 12), None, torch.arange(5).flip(0)[None]).square().sum().backward()
    tracer.finish()
    verdict = execute(Request(op="torchtitan.overrides.fused_mla.fused_mla", capture=str(tmp_path / "mla")))
    assert verdict.verdict == "PASS", verdict.summary
    assert "_fused_q_rope_kernel" in verdict.fidelity.kernels


def test_what_cannot_be_found_is_named(stock: Path, tmp_path: Path) -> None:
    def refused(op: str, folder: Path = stock) -> str:
        with pytest.raises(UsageError) as caught:
            execute(Request(op=op, capture=str(folder)))
        return str(caught.value)

    assert "did you mean torchtitan.overrides.fused_swiglu.fused_swiglu" in refused(FUSED + "s")
    assert "unknown op 'no.such.override'" in refused("no.such.override")
    assert "unknown op 'NoSuchModule'" in refused("NoSuchModule")
    with pytest.raises(UsageError, match="is judged on the calls of a run: add --from CAPTURE"):
        execute(Request(op=FUSED))
    model = torch.nn.Sequential(torch.nn.Linear(3, 3))
    tracer = Tracer(model, out=tmp_path / "other", step=1, selection=Selection(patterns=("Linear",)))
    with tracer:
        model(torch.randn(2, 3))
    tracer.finish()
    assert "no call of FeedForward" in refused(FUSED, tmp_path / "other")


def test_a_capture_without_the_config_says_how_to_get_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.feed_forward = feed_forward_config().build()
    tracer = Tracer(model, out=tmp_path / "bare", step=1, selection=Selection(patterns=("FeedForward",)))
    with tracer:
        model.feed_forward(torch.randn(2, 16))
    tracer.finish()
    assert load_capture(tmp_path / "bare").calls
    with pytest.raises(UsageError, match="does not hold the torchtitan config of module 'feed_forward'"):
        execute(Request(op=FUSED, capture=str(tmp_path / "bare")))


def test_a_capture_without_the_parameters_says_how_to_get_them(tmp_path: Path) -> None:
    model = torch.nn.Module()
    model.feed_forward = feed_forward_config().build()
    config = {"model_spec": {"model": {"feed_forward": feed_forward_config().to_dict()}}}
    selection = Selection(patterns=("Linear",))
    tracer = Tracer(model, out=tmp_path / "other", step=1, selection=selection, config=config)
    with tracer:
        model.feed_forward(torch.randn(2, 16))
    tracer.finish()
    with pytest.raises(BridgeError, match=r"must hold w1.weight.* capture the step with --ops FeedForward"):
        execute(Request(op=FUSED, capture=str(tmp_path / "other")))


@pytest.mark.skipif(importlib.util.find_spec("helion") is not None, reason="the package is installed here")
@pytest.mark.parametrize("place", ["stock", "replaced"])
def test_an_override_that_needs_a_package_names_it(tmp_path: Path, place: str) -> None:
    from torchtitan.models.common.rope import CosSinRoPE

    helion = "torchtitan.overrides.helion_rope.helion_cos_sin_rope"
    config = CosSinRoPE.Config(dim=8, max_seq_len=16)
    model = torch.nn.Module()
    model.rope = config.build()
    if place == "replaced":
        model.rope.__class__ = type("HelionCosSinRoPE", (CosSinRoPE,), {})
    name = type(model.rope).__name__
    manifest = {
        "model_spec": {"model": {"rope": config.to_dict()}},
        "override": {"imports": [helion]},
    }
    tracer = Tracer(
        model, out=tmp_path / "rope", step=1, selection=Selection(patterns=(name,)), config=manifest
    )
    with tracer:
        model.rope(torch.randn(1, 5, 2, 8), torch.randn(1, 5, 2, 8), None)
    tracer.finish()
    for op in (helion, name) if place == "replaced" else (helion,):
        with pytest.raises(UsageError) as caught:
            execute(Request(op=op, capture=str(tmp_path / "rope")))
        text = str(caught.value)
        assert f"{helion} needs the package helion, which is not installed" in text
        assert "pip install helion" in text and "\n" not in text
