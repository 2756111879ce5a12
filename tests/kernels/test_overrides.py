"""The torchtitan overrides: applied by torchtitan, state dict unchanged, results of the eager module."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

titan = pytest.importorskip(
    "torchtitan.config.override", reason="torchtitan here has no overrides (needs 0.3)"
)

from torchtitan.models.common import nn_modules  # noqa: E402
from torchtitan.models.common import rope as titan_rope  # noqa: E402
from torchtitan.models.common.feed_forward import FeedForward  # noqa: E402
from torchtitan.models.common.linear import Linear, ScaledBiasRowwiseLinear  # noqa: E402
from torchtitan.protocols.module import Module  # noqa: E402

from bridge.errors import UsageError  # noqa: E402
from bridge.kernels.offset_rmsnorm.module import OffsetRMSNorm  # noqa: E402


class Holder(Module):
    """A module with one child, so that the child's config has a place to be replaced in."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        child: Any

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.child = config.child.build()


def swap(config: Any, entry: Any) -> tuple[Any, Any]:
    """Build `config` as it is and with the override `entry` applied; both with the same state."""
    plain = Holder.Config(child=config).build()
    plain.init_states()
    root = Holder.Config(child=config)
    titan.apply_overrides(titan.OverrideConfig(imports=[entry]), root)
    replaced = root.build()
    replaced.load_state_dict(plain.state_dict(), strict=True)
    assert list(plain.state_dict()) == list(replaced.state_dict())
    return plain.child, replaced.child


OFFSET = "bridge.kernels.offset_rmsnorm.override.offset_rmsnorm"


def test_offset_rmsnorm(gate: SimpleNamespace) -> None:
    plain, kernel = swap(OffsetRMSNorm.Config(dim=40, eps=1e-5), OFFSET)
    assert type(kernel).__name__ == "KernelOffsetRMSNorm" and kernel.eps == 1e-5
    x = torch.randn(2, 3, 40, device=gate.device)
    for module in (plain, kernel):
        module.to(gate.device)
        torch.nn.init.normal_(module.weight, generator=torch.Generator(device=gate.device).manual_seed(1))
    torch.testing.assert_close(kernel(x), plain(x), rtol=1e-6, atol=1e-6)


def test_offset_rmsnorm_of_qwen3_5() -> None:
    """That model imports `fla`, which is not here: a stand-in is enough to build its norm and replace it."""
    names = [
        "fla",
        "fla.modules",
        "fla.modules.conv",
        "fla.modules.conv.triton",
        "fla.modules.conv.triton.ops",
    ]
    names += ["fla.ops", "fla.ops.gated_delta_rule", "fla.ops.gated_delta_rule.chunk"]
    names += ["fla.ops.gated_delta_rule.fused_recurrent"]
    code = f"""
import sys
from unittest.mock import MagicMock
for name in {names!r}:
    sys.modules[name] = MagicMock(__path__=[], __spec__=None)
import torch
from torchtitan.models.qwen3_5.model import OffsetRMSNorm
from bridge.kernels.offset_rmsnorm.override_qwen3_5 import offset_rmsnorm
config = OffsetRMSNorm.Config(dim=24, param_init={{"weight": torch.nn.init.normal_}})
plain = config.build()
plain.init_states()
kernel = offset_rmsnorm(config, backend="kernel").build()
kernel.load_state_dict(plain.state_dict())
x = torch.randn(2, 3, 24)
assert isinstance(kernel, OffsetRMSNorm)
torch.testing.assert_close(kernel(x), plain(x))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_backend_can_be_given() -> None:
    _, kernel = swap(OffsetRMSNorm.Config(dim=8), (OFFSET, {"backend": "auto"}))
    assert kernel.backend == "auto"


def _compare(gate: SimpleNamespace, plain: Any, kernel: Any, *shape: int) -> None:
    """Outputs and parameter gradients of both modules agree on a random input."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(5)).to(gate.device)
    plain.to(gate.device)
    kernel.to(gate.device)
    outputs = [module(x) for module in (plain, kernel)]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)
    grads = []
    for module, output in zip((plain, kernel), outputs, strict=True):
        output.square().sum().backward()
        grads.append([p.grad for p in module.parameters()])
    if len(grads[0]) == len(grads[1]):
        for one, two in zip(*grads, strict=True):
            torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-4)


def test_rms_norm(gate: SimpleNamespace) -> None:
    config = nn_modules.RMSNorm.Config(normalized_shape=40, eps=1e-5)
    _compare(gate, *swap(config, "bridge.kernels.rms_norm.override.rms_norm"), 3, 5, 40)


def test_layer_norm(gate: SimpleNamespace) -> None:
    config = nn_modules.LayerNorm.Config(normalized_shape=40, eps=1e-5)
    _compare(gate, *swap(config, "bridge.kernels.layer_norm.override.layer_norm"), 3, 5, 40)


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_a_norm_without_weight_is_refused(norm: str) -> None:
    config_class = {"rms_norm": nn_modules.RMSNorm, "layer_norm": nn_modules.LayerNorm}[norm].Config
    with pytest.raises(UsageError, match="elementwise_affine=False"):
        swap(
            config_class(normalized_shape=8, elementwise_affine=False),
            f"bridge.kernels.{norm}.override.{norm}",
        )


SWIGLU = "bridge.kernels.fused_swiglu.override.fused_swiglu"


def _feed_forward(bias: bool = False) -> Any:
    def linear(inputs: int, outputs: int, std: float) -> Any:
        return Linear.Config(
            in_features=inputs,
            out_features=outputs,
            bias=bias,
            param_init={"weight": partial(torch.nn.init.normal_, std=std), "bias": torch.nn.init.zeros_},
        )

    return FeedForward.Config(w1=linear(16, 24, 0.02), w2=linear(24, 16, 0.02), w3=linear(16, 24, 0.5))


def test_fused_swiglu(gate: SimpleNamespace) -> None:
    _compare(gate, *swap(_feed_forward(), SWIGLU), 3, 5, 16)


def test_fused_swiglu_checkpoints_are_the_stock_blocks_bit_for_bit() -> None:
    plain, fused = swap(_feed_forward(), SWIGLU)
    saved = fused.state_dict()
    assert set(saved) == set(plain.state_dict()) == {"w1.weight", "w2.weight", "w3.weight"}
    for name, tensor in plain.state_dict().items():
        assert torch.equal(saved[name], tensor)
    other, _ = swap(_feed_forward(), SWIGLU)
    other.load_state_dict(saved, strict=True)
    assert torch.equal(other.w3.weight, plain.w3.weight)
    assert torch.equal(fused.w13[:, 0], plain.w1.weight) and torch.equal(fused.w13[:, 1], plain.w3.weight)


def test_fused_swiglu_names_the_keys_that_are_missing() -> None:
    plain, fused = swap(_feed_forward(), SWIGLU)
    state = plain.state_dict()
    before = fused.w13.detach().clone()
    del state["w3.weight"]
    with pytest.raises(RuntimeError) as caught:
        fused.load_state_dict(state, strict=True)
    assert "w3.weight" in str(caught.value)
    assert "w13" not in str(caught.value) and "w1.weight" not in str(caught.value)
    result = fused.load_state_dict({"w2.weight": state["w2.weight"]}, strict=False)
    assert result.missing_keys == ["w1.weight", "w3.weight"] and not result.unexpected_keys
    assert torch.equal(fused.w13, before)
    assert fused.load_state_dict({**plain.state_dict(), "w4": before}, strict=False).unexpected_keys == ["w4"]
    del state["w1.weight"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"_orig_mod\.w1\.weight", "_orig_mod\.w3\.weight"'):
        torch.compile(fused).load_state_dict({f"_orig_mod.{name}": value for name, value in state.items()})
    # A module without memory has no half that could stand in for the other.
    del state["w2.weight"]
    state["w1.weight"] = plain.w1.weight.detach()
    result = fused.to("meta").load_state_dict(state, strict=False, assign=True)
    assert result.missing_keys == ["w3.weight", "w2.weight"] and not result.unexpected_keys


def test_fused_swiglu_names_a_key_of_the_wrong_size() -> None:
    plain, fused = swap(_feed_forward(), SWIGLU)
    state = plain.state_dict()
    state["w3.weight"] = state["w3.weight"][:5]
    with pytest.raises(RuntimeError, match=r"for w3\.weight: \(5, 16\) in the checkpoint, \(24, 16\) here"):
        fused.load_state_dict(state, strict=False)


def test_fused_swiglu_and_the_stock_block_load_each_others_distributed_checkpoints(tmp_path: Path) -> None:
    """Saved and loaded as torchtitan does it, the first time and after steps; compiled in place or not."""
    import torch.distributed.checkpoint as dcp
    from torchtitan.components.checkpointer.base import ModelWrapper

    plain, fused = swap(_feed_forward(), SWIGLU)
    other, compiled = swap(_feed_forward(), SWIGLU)
    compiled.compile(backend="eager")
    for turn, (source, target) in enumerate(((fused, other), (other, compiled), (compiled, plain))):
        torch.nn.init.normal_(next(source.parameters()))
        dcp.save(ModelWrapper(source).state_dict(), checkpoint_id=tmp_path / str(turn), no_dist=True)
        wrapper = ModelWrapper(target)
        state = wrapper.state_dict()
        dcp.load(state, checkpoint_id=tmp_path / str(turn), no_dist=True)
        wrapper.load_state_dict(state)
        saved = source.state_dict()
        assert list(saved) == list(target.state_dict()) == ["w1.weight", "w2.weight", "w3.weight"]
        assert all(torch.equal(tensor, saved[name]) for name, tensor in target.state_dict().items())


@pytest.mark.parametrize("configured", [True, False], ids=["configured", "torch's own"])
def test_fused_swiglu_has_the_stock_blocks_weights_for_a_seed(configured: bool) -> None:
    """The random numbers drawn, and those left for the modules that follow, are the same."""
    results = []
    for imports in ([], [SWIGLU]):
        root = Holder.Config(child=_feed_forward())
        if not configured:
            for linear in (root.child.w1, root.child.w2, root.child.w3):
                linear.param_init = None
        titan.apply_overrides(titan.OverrideConfig(imports=imports), root)
        built = root.build()
        torch.manual_seed(3)
        built.init_states()
        results.append({**built.state_dict(), "next": torch.randn(4)})
    assert set(results[0]) == set(results[1])
    assert all(torch.equal(tensor, results[1][name]) for name, tensor in results[0].items())


def test_fused_swiglu_with_bias_is_refused() -> None:
    with pytest.raises(UsageError, match="without bias"):
        swap(_feed_forward(bias=True), SWIGLU)


def test_fused_swiglu_in_place_of_other_linears_is_refused() -> None:
    """A quantised linear, say, would be computed as a plain one."""
    config = _feed_forward()
    config.w3 = ScaledBiasRowwiseLinear.Config(in_features=16, out_features=24)
    with pytest.raises(UsageError, match="plain Linear for w1 and w3, and w3 is a ScaledBiasRowwiseLinear"):
        swap(config, SWIGLU)


def test_fused_swiglu_in_a_model_and_through_its_hugging_face_adapter() -> None:
    """The debug model with and without the override gives, and takes, the same Hugging Face checkpoint."""
    from torchtitan.models.llama3 import llama3_configs
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

    def build(imports: list[str]) -> tuple[Any, Any]:
        config = llama3_configs["debugmodel"]("flex")
        titan.apply_overrides(titan.OverrideConfig(imports=imports), config)
        return config, config.build()

    plain_config, plain = build([])
    plain.init_states()
    fused_config, fused = build([SWIGLU])
    fused.load_state_dict(plain.state_dict(), strict=True)
    one = Llama3StateDictAdapter(plain_config, None).to_hf(plain.state_dict())
    two = Llama3StateDictAdapter(fused_config, None).to_hf(fused.state_dict())
    assert set(one) == set(two) and any("gate_proj" in name for name in one)
    assert all(torch.equal(one[name], two[name]) for name in one)
    fresh = fused_config.build()
    back = Llama3StateDictAdapter(fused_config, None).from_hf(one)
    missing = fresh.load_state_dict(back, strict=False)
    assert not missing.unexpected_keys and not [name for name in missing.missing_keys if "weight" in name]
    state = plain.state_dict()
    assert all(torch.equal(fresh.state_dict()[name], state[name]) for name in back)
    assert any(name.endswith("feed_forward.w3.weight") for name in back)


@pytest.mark.parametrize(("kind", "entry"), [("CosSinRoPE", "cos_sin_rope"), ("ComplexRoPE", "complex_rope")])
@pytest.mark.parametrize("given", [True, False], ids=["positions", "no positions"])
def test_rope(gate: SimpleNamespace, kind: str, entry: str, given: bool) -> None:
    config = getattr(titan_rope, kind).Config(dim=16, max_seq_len=32)
    plain, kernel = swap(config, f"bridge.kernels.rope.override.{entry}")
    plain.to(gate.device)
    kernel.to(gate.device)
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(2, 5, 4, 16, generator=generator).to(gate.device)
    key = torch.randn(2, 5, 2, 16, generator=generator).to(gate.device)
    positions = torch.randint(0, 32, (2, 5), generator=generator).to(gate.device) if given else None
    for one, two in zip(plain(query, key, positions), kernel(query, key, positions), strict=True):
        torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-6)


def test_cross_entropy(gate: SimpleNamespace) -> None:
    from torchtitan.components.loss import CrossEntropyLoss

    root = Holder.Config(child=CrossEntropyLoss.Config())
    titan.apply_overrides(
        titan.OverrideConfig(imports=["bridge.kernels.cross_entropy.override.cross_entropy"]), root
    )
    logits = torch.randn(2, 5, 37, generator=torch.Generator().manual_seed(2)).to(gate.device)
    labels = torch.randint(0, 37, (2, 5), generator=torch.Generator().manual_seed(2)).to(gate.device)
    labels[0, 3] = -100
    losses = []
    for config in (CrossEntropyLoss.Config(), root.child):
        leaf = logits.clone().requires_grad_()
        loss, _ = config.build()(leaf, labels, torch.tensor(9.0, device=gate.device))
        losses.append((loss.detach(), *torch.autograd.grad(loss, leaf)))
    for one, two in zip(*losses, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-6)


def test_adamw(gate: SimpleNamespace) -> None:
    """Some steps equal torch's AdamW, and each loads the other's state."""
    from torchtitan.components.optimizer import OptimizersContainer, default_adamw

    root = Holder.Config(child=default_adamw(lr=1e-2))
    root.child.implementation = "for-loop"
    original = root.child
    titan.apply_overrides(titan.OverrideConfig(imports=["bridge.kernels.adamw.override.adamw"]), root)
    models = [torch.nn.Linear(7, 5).to(gate.device) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [c.build(model_parts=[m]) for c, m in zip((original, root.child), models, strict=True)]
    assert type(optimizers[1]) is not OptimizersContainer
    x = torch.randn(11, 7, generator=torch.Generator().manual_seed(4)).to(gate.device)

    def steps(count: int) -> None:
        for _ in range(count):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(x).square().sum().backward()
                optimizer.step()

    steps(3)
    states = [optimizer.state_dict() for optimizer in optimizers]
    assert set(states[0]) == set(states[1])
    optimizers[1].load_state_dict(states[0])
    optimizers[0].load_state_dict(states[1])
    steps(2)
    for one, two in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-6)


def test_sharded_tensors(tmp_path: Path) -> None:
    """Two ranks: norm, rotary embedding and optimizer step give what a single process gives."""
    script = Path(__file__).with_name("sharded.py")
    ranks = []
    for rank in range(2):
        env = os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "STORE": str(tmp_path / "store")}
        ranks.append(
            subprocess.Popen([sys.executable, str(script)], env=env, stderr=subprocess.PIPE, text=True)
        )
    for process in ranks:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors[-2000:]
