"""Every override of a built-in kernel in one torchtitan run, each kernel then judged on that run's calls."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

pytest.importorskip("torchtitan.config.override", reason="overrides came with torchtitan 0.3")

from bridge.capture import load_capture
from bridge.capture.replace import replaced
from bridge.verify.registry import prepare_triton
from bridge.verify.request import Request
from bridge.verify.session import execute
from tests.e2e.conftest import bridge_command, once

pytestmark = pytest.mark.e2e

#: The demo's decoder with one norm and one rotary embedding of every kind.
CONFIG = """
from bridge.demo.config_registry import DIM, HEADS, offset_decoder
from torchtitan.models.common import CosSinRoPE
from torchtitan.models.common.nn_modules import LayerNorm, RMSNorm

def mixed():
    config = offset_decoder()
    first, second = config.model_spec.model.layers
    first.attention_norm = RMSNorm.Config(normalized_shape=DIM, eps=1e-6)
    first.ffn_norm = LayerNorm.Config(normalized_shape=DIM, eps=1e-5)
    second.attention.rope = CosSinRoPE.Config(dim=DIM // HEADS, max_seq_len=1024, theta=10000)
    return config
"""
OVERRIDES = (
    "offset_rmsnorm.override.offset_rmsnorm",
    "rms_norm.override.rms_norm",
    "layer_norm.override.layer_norm",
    "fused_swiglu.override.fused_swiglu",
    "rope.override.complex_rope",
    "rope.override.cos_sin_rope",
    "cross_entropy.override.cross_entropy",
    "adamw.override.adamw",
)
KERNELS = tuple(dict.fromkeys(name.partition(".")[0] for name in OVERRIDES))


def _captured(folder: Path, imports: Iterable[str], *arguments: str) -> None:
    """Run that config with these overrides and capture its second step."""
    (folder / "mixed.py").write_text(CONFIG, encoding="utf-8")
    names = ", ".join(f'"bridge.kernels.{name}"' for name in imports)
    (folder / "train.toml").write_text(
        f'[train]\nmodule = "mixed"\nconfig = "mixed"\n[train.set]\n"override.imports" = [{names}]\n',
        encoding="utf-8",
    )
    done = bridge_command("capture", "--step", "2", *arguments, cwd=folder, PYTHONPATH=str(folder))
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def replaced_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`capture/`: the second step of that run, with the tensors of all kernels."""
    wanted = [part for name in KERNELS for part in ("--ops", name)]
    return once(tmp_path_factory, "replaced", lambda folder: _captured(folder, OVERRIDES, *wanted))


def test_loss_and_gradient_are_the_stock_runs(replaced_run: Path, tmp_path: Path) -> None:
    """The same seed gives the same weights, and a step of all kernels leaves them as they should be."""
    _captured(tmp_path, (), "--tensors", "none")
    stock, replaced = (load_capture(f / "capture").manifest.metrics for f in (tmp_path, replaced_run))
    assert stock["loss"] == pytest.approx(replaced["loss"], rel=1e-6)
    assert stock["grad_norm"] == pytest.approx(replaced["grad_norm"], rel=1e-6)


def test_the_overrides_are_there(replaced_run: Path) -> None:
    launched = {call.op for call in load_capture(replaced_run / "capture").calls if call.kind == "launch"}
    assert launched >= {
        "offset_rms_norm_forward_kernel", "rms_norm_backward_kernel", "layer_norm_backward_kernel",
        "swiglu_backward_kernel", "rope_kernel", "cross_entropy_backward_kernel", "adamw_step_kernel",
    }  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS)
def test_each_kernel_passes_on_the_calls_of_the_run(replaced_run: Path, kernel: str) -> None:
    prepare_triton()
    verdict = execute(Request(op=kernel, capture=str(replaced_run / "capture"), sweep=False, max_calls=2))
    assert verdict.verdict == "PASS", verdict.summary
    assert {case.family for case in verdict.cases} == {"captured"}
    assert verdict.fidelity.status == "bit-equal"


SCRIPT = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(8, 16), torch.nn.RMSNorm(16, eps=1e-6), torch.nn.Linear(16, 12), torch.nn.LayerNorm(12)
)
loss = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    loss(model(torch.randn(5, 8)), torch.tensor([0, 3, -100, 11, 7])).backward()
    optimizer.step()
torch.save(model.state_dict(), "state.pt")
"""
REPLACED = {
    "torch.nn.RMSNorm": "rms_norm",
    "torch.nn.LayerNorm": "layer_norm",
    "torch.nn.CrossEntropyLoss": "cross_entropy",
}


def test_replaced_module_classes_leave_the_state_dict_and_themselves_alone(tmp_path: Path) -> None:
    """Of a script, which has no overrides: the same checkpoint, to rounding, with the kernels in place."""
    import torch

    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    table = ", ".join(f'"{name}" = "{kernel}"' for name, kernel in REPLACED.items())
    config = '[train]\nscript = "../train.py"\n[capture]\nstep = 3\n'
    states = {}
    for place, more in (("plain", ""), ("kernel", f"replace = {{{table}}}\n")):
        folder = tmp_path / place
        folder.mkdir()
        (folder / "train.toml").write_text(config + more, encoding="utf-8")
        done = bridge_command("capture", "--config", "train.toml", "--continue", cwd=folder)
        assert done.returncode == 0, done.stderr
        states[place] = torch.load(folder / "state.pt")
    assert list(states["plain"]) == list(states["kernel"])
    for name, tensor in states["plain"].items():
        torch.testing.assert_close(states["kernel"][name], tensor, rtol=1e-5, atol=1e-6, msg=name)
    capture = load_capture(tmp_path / "kernel" / "capture")
    launched = {call.op for call in capture.calls if call.kind == "launch"}
    assert launched >= {
        "rms_norm_backward_kernel", "layer_norm_backward_kernel", "cross_entropy_backward_kernel"
    }  # fmt: skip
    classes = [getattr(torch.nn, name.rpartition(".")[2]) for name in REPLACED]
    before = [owner.forward for owner in classes]
    with replaced(REPLACED):
        assert all(owner.forward is not old for owner, old in zip(classes, before, strict=True))
    assert [owner.forward for owner in classes] == before
