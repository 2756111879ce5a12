"""The demo: its files load, its good kernel trains as eager does, its broken one has the fault it says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

import bridge.demo
from bridge.capture.steps import RunFacts, StepRecorder
from bridge.capture.window import parse_window
from bridge.config import load_config
from bridge.verify.registry import load_spec

FOLDER = Path(bridge.demo.__file__).parent
TITAN_03 = pytest.mark.skipif(
    not metadata.version("torchtitan").startswith("0.3."), reason="the demo's configs are torchtitan 0.3's"
)


class Losses(StepRecorder):
    """Records nothing but the losses of the first steps."""

    def __init__(self, steps: int) -> None:
        super().__init__(parse_window(f"1:{steps}"), self._nothing)

    @contextmanager
    def _nothing(self, parts: Sequence[Any], facts: RunFacts, step: int) -> Iterator[None]:
        yield


def losses(tmp_path: Path, overrides: list[str], steps: int) -> list[float | None]:
    from bridge.capture.titan import run_titan
    from bridge.config import TrainConfig

    settings = {"override.imports": overrides, "dump_folder": str(tmp_path)}
    recorder = Losses(steps)
    run_titan(
        TrainConfig(module="bridge.demo", config="offset_decoder", set=settings), recorder, config_path=None
    )
    return [loss for loss, _ in recorder.losses.values()]


@TITAN_03
def test_the_good_kernel_trains_as_eager_and_the_broken_one_does_not(tmp_path: Path) -> None:
    eager = losses(tmp_path, [], 2)
    good = losses(tmp_path, load_config(FOLDER / "train.toml").train.set["override.imports"], 2)
    broken = losses(tmp_path, load_config(FOLDER / "broken.toml").train.set["override.imports"], 2)
    assert good == pytest.approx(eager, rel=1e-6)
    assert broken[0] == pytest.approx(eager[0], rel=1e-6)
    assert broken[1] != pytest.approx(eager[1], rel=1e-3)


def test_the_broken_kernel_has_the_fault_that_it_says() -> None:
    spec = load_spec(str(FOLDER / "broken_kernel.py")).spec
    assert spec.name == "offset_rmsnorm"
    assert "BrokenOffsetRMSNorm" in spec.sites
    generator = torch.Generator().manual_seed(0)
    given = spec.sample((37, 96), torch.float32, generator, "cpu")
    grad = torch.randn(37, 96, generator=generator)

    def run(function: Any) -> tuple[torch.Tensor, ...]:
        leaves = [tensor.clone().requires_grad_() for tensor in given]
        y = function(*leaves, **spec.attrs)
        return (y.detach(), *torch.autograd.grad(y, leaves, grad))

    y, grad_x, grad_weight = run(spec.target)
    right_y, right_grad_x, right_grad_weight = run(spec.reference)
    torch.testing.assert_close(y, right_y)
    torch.testing.assert_close(grad_weight, right_grad_weight)
    torch.testing.assert_close(grad_x, run(spec.faults["1 + w missing in grad_x"])[1], rtol=1e-4, atol=1e-6)
    assert float((grad_x - right_grad_x).norm()) > 0.5 * float(right_grad_x.norm())


@TITAN_03
def test_the_tokenizer_keeps_every_byte_of_the_text() -> None:
    from torchtitan.components.tokenizer import HuggingFaceTokenizer

    from bridge.demo.config_registry import ASSETS, VOCABULARY

    tokenizer = HuggingFaceTokenizer.Config().build(tokenizer_path=str(ASSETS))
    text = (ASSETS / "text.txt").read_text(encoding="utf-8")
    tokens = tokenizer.encode(text, add_bos=True, add_eos=True)
    assert len(tokens) == len(text.encode()) + 2
    assert max(tokens) < tokenizer.get_vocab_size() <= VOCABULARY
    assert tokenizer.decode(tokens[1:-1]) == text


def test_the_job_file_is_recognised_as_torchtitan_02() -> None:
    assert load_config(FOLDER / "job.toml").train.job == str((FOLDER / "job.toml").resolve())


def test_importing_the_demo_loads_nothing() -> None:
    import subprocess
    import sys

    code = "import sys, bridge.demo; print({'torch', 'triton', 'torchtitan'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
