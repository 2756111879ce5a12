"""A kernel in a module class's place for the length of a run."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch

from bridge.capture import capture_run, load_capture
from bridge.capture.replace import replaced
from bridge.config import BridgeConfig, CaptureConfig, TrainConfig
from bridge.errors import ConfigError, RunError, UsageError

SCRIPT = """
    import torch
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.RMSNorm(16), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).pow(2).mean().backward()
        optimizer.step()
"""


def test_a_script_runs_on_the_kernel_and_the_class_is_as_it_was(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    before = torch.nn.RMSNorm.forward
    plain = capture_run(BridgeConfig(train=TrainConfig(script=str(script))), step=3, out=tmp_path / "plain")
    config = BridgeConfig(
        train=TrainConfig(script=str(script)),
        capture=CaptureConfig(replace={"torch.nn.RMSNorm": "rms_norm"}, ops=("rms_norm",)),
    )
    result = capture_run(config, step=3, out=tmp_path / "kernel")
    assert torch.nn.RMSNorm.forward is before
    capture = load_capture(result.path)
    assert capture.manifest.flags["replaced"] == {"torch.nn.RMSNorm": "rms_norm"}
    (norm,) = [call for call in capture.calls if call.kind == "module" and call.module_class == "RMSNorm"]
    assert [call.kind for call in capture.calls if call.kind == "launch"]
    assert result.kernels[0] == "rms_norm"
    # The same numbers as eager, to rounding: eps of the module is None, which means the dtype's own.
    assert result.metrics["loss"] == pytest.approx(plain.metrics["loss"], rel=1e-5)
    x, weight = capture.tensor(norm.inputs[0]), capture.tensor(norm.params[0])
    torch.testing.assert_close(capture.tensor(norm.outputs[0]), torch.rms_norm(x, (16,), weight))


@pytest.mark.parametrize(
    ("classes", "error", "message"),
    [
        ({"torch.nn.RMSNrm": "rms_norm"}, ConfigError, "cannot be imported"),
        ({"RMSNorm": "rms_norm"}, ConfigError, "cannot be imported"),
        ({"torch.nn.functional.relu": "rms_norm"}, ConfigError, r"no torch\.nn\.Module"),
        ({"torch.nn.RMSNorm": "rms_nrm"}, UsageError, "did you mean rms_norm"),
    ],
)
def test_what_cannot_be_replaced(classes: dict[str, str], error: type[Exception], message: str) -> None:
    before = torch.nn.RMSNorm.forward
    with pytest.raises(error, match=message), replaced(classes):
        pass
    assert torch.nn.RMSNorm.forward is before


def test_a_class_without_the_kernels_inputs_says_which() -> None:
    with replaced({"torch.nn.RMSNorm": "layer_norm"}), pytest.raises(RunError, match="needs 'bias'"):
        torch.nn.RMSNorm(8)(torch.randn(2, 8))
    with replaced({"torch.nn.Bilinear": "rms_norm"}), pytest.raises(RunError, match="was called with 3"):
        torch.nn.Bilinear(2, 2, 2)(torch.randn(2), torch.randn(2), torch.randn(2))


def test_what_a_kernel_would_leave_out_is_refused() -> None:
    """Class weights that no kernel reads, an axis that torch picks by the number of axes: other numbers."""
    logits, target = torch.randn(2, 3), torch.tensor([0, 2])
    with replaced({"torch.nn.CrossEntropyLoss": "cross_entropy"}):
        with pytest.raises(RunError, match=r"does not read weight, which this torch\.nn\.Cross"):
            torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))(logits, target)
        assert torch.nn.CrossEntropyLoss(reduction="sum")(logits, target).shape == ()
    with replaced({"torch.nn.Softmax": "softmax"}):
        with pytest.raises(RunError, match=r"needs 'dim', which this torch\.nn\.Softmax leaves"):
            torch.nn.Softmax()(torch.randn(2, 3, 4, 5))
        torch.testing.assert_close(torch.nn.Softmax(0)(logits).sum(0), torch.ones(3))
