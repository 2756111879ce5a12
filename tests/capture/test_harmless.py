"""Training with a capture in the middle is training without one, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizers
from torch.utils.checkpoint import checkpoint

from bridge.capture.select import Selection
from bridge.capture.store import load_capture
from bridge.capture.tracer import Tracer
from tests.capture.conftest import Net, Trainer


class Checkpointed(Net):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.norm(x) @ self.embedding.weight.t()


def run(
    make: Callable[[], Trainer], out: Path | None, around: Any = contextlib.nullcontext
) -> dict[str, Any]:
    """Ten steps; the fifth and seventh captured with everything stored when `out` is given."""
    torch.manual_seed(11)
    trainer = make()
    losses, norms = [], []
    for step in range(10):
        tracer: Any = contextlib.nullcontext()
        if out is not None and step in (5, 7):
            tracer = Tracer(
                trainer.model, out=out / f"step{step}", step=step, selection=Selection(patterns=("*",))
            )
        with tracer, around():
            loss = trainer.loss()
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0))
            grads = [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
        losses.append(loss.detach())
        if out is not None and step in (5, 7):
            tracer.finish()
    state = [v for s in trainer.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return {
        "losses": losses,
        "norms": norms,
        "grads": grads,
        "parameters": [p.detach().clone() for p in trainer.model.parameters()],
        "optimizer": state,
        "rng": [torch.get_rng_state()],
    }


MODES: dict[str, tuple[Callable[[], Trainer], Any]] = {
    "eager": (lambda: Trainer(Net()), contextlib.nullcontext),
    "fused": (lambda: Trainer(Net(), fused=True), contextlib.nullcontext),
    "foreach": (lambda: Trainer(Net(), foreach=True), contextlib.nullcontext),
    "checkpoint": (lambda: Trainer(Checkpointed()), contextlib.nullcontext),
    "autocast": (lambda: Trainer(Net()), lambda: torch.autocast("cpu", torch.bfloat16)),
}


@pytest.mark.parametrize("mode", MODES)
def test_ten_steps_are_bit_equal(mode: str, tmp_path: Path) -> None:
    make, around = MODES[mode]
    plain = run(make, None, around)
    traced = run(make, tmp_path, around)
    for name, tensors in plain.items():
        for position, (left, right) in enumerate(zip(tensors, traced[name], strict=True)):
            assert torch.equal(left, right), f"{name}[{position}]"
    for step in (5, 7):
        capture = load_capture(tmp_path / f"step{step}")
        assert capture.complete, capture.problems
        assert len(capture.calls) > 50


@pytest.mark.parametrize("place", ["begin", "end", "module", "gradient", "contents"])
def test_an_error_in_our_hooks_is_noted_and_training_goes_on(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run(MODES["eager"][0], None)

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("planted")

    where = {
        "begin": ("bridge.capture.recorder.Recorder._begin", fail),
        "end": ("bridge.capture.recorder.Recorder.emit", fail),
        "module": ("bridge.capture.modules.ModuleHooks._begin", fail),
        "gradient": ("bridge.capture.gradients.GradientWatch._add", fail),
        "contents": ("bridge.capture.contents.Contents.store", fail),
    }[place]
    monkeypatch.setattr(*where)
    traced = run(MODES["eager"][0], tmp_path)
    for name, tensors in plain.items():
        for left, right in zip(tensors, traced[name], strict=True):
            assert torch.equal(left, right), name
    capture = load_capture(tmp_path / "step5")
    assert not capture.complete
    assert any("planted" in text for text in capture.problems)


def test_nothing_stays_installed(tmp_path: Path, trainer: Trainer) -> None:
    modules = list(trainer.model.modules())

    def installed() -> tuple[Any, ...]:
        return (
            [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules],
            torch._C._len_torch_dispatch_stack(),
            len(optimizers._global_optimizer_pre_hooks),
            "resize_" in vars(torch.UntypedStorage),
        )

    before = installed()
    tracer = Tracer(trainer.model, out=tmp_path / "c", step=1, selection=Selection(patterns=("*",)))
    assert installed() == before
    with tracer:
        trainer.step()
    assert installed() == before
    tracer.finish()
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    assert "launches" not in InterpretedFunction.run.__code__.co_filename
    assert "launches" not in JITFunction.run.__code__.co_filename


def test_a_module_that_raises_and_is_caught_leaves_the_names_right(tmp_path: Path) -> None:
    class Fragile(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no")

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fragile, self.good = Fragile(), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with contextlib.suppress(ValueError):
                self.fragile(x)
            return self.good(x * 2)

    tracer = Tracer(outer := Outer(), out=tmp_path / "c", step=1)
    with tracer:
        outer(torch.ones(1, 2)).sum().backward()
    capture = load_capture(tracer.finish())
    assert capture.complete, capture.problems
    assert capture.call("good/op_0_addmm").module == "good"
    assert [c.module for c in capture.calls if c.op == "aten::mul.Tensor" and c.phase == "forward"] == [""]
    assert capture.call("fragile").note == "returned nothing, or raised"


def test_an_operator_that_raises_is_recorded_and_its_error_reaches_the_run(tmp_path: Path) -> None:
    tracer = Tracer(None, out=tmp_path / "c", step=1)
    with tracer, contextlib.suppress(RuntimeError):
        torch.mm(torch.ones(2, 3), torch.ones(2, 3))
    capture = load_capture(tracer.finish())
    (call,) = capture.find("mm")
    assert call.note == "raised RuntimeError"
    assert not call.replayable
