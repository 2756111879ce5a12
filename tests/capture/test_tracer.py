"""What a captured step says is what happened in it, by independent means."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.utils.checkpoint import checkpoint

from bridge.capture.digest_host import digest_bytes
from bridge.capture.layout import is_row_major
from bridge.capture.select import Selection
from bridge.capture.store import Capture, load_capture
from bridge.capture.tracer import Tracer
from bridge.errors import UsageError

CaptureOf = Callable[..., Capture]


def test_module_tensors_equal_what_forward_hooks_saw(trainer: Any, capture_of: CaptureOf) -> None:
    module = trainer.model.layers[1].norm
    seen: dict[str, torch.Tensor] = {}

    def before(_: nn.Module, args: Any) -> None:
        seen["inputs/0"] = args[0].detach().clone()
        seen["params/weight"] = module.weight.detach().clone()

    def after(_: nn.Module, args: Any, output: torch.Tensor) -> None:
        seen["outputs/0"] = output.detach().clone()
        output.register_hook(lambda grad: seen.__setitem__("grad_outputs/0", grad.clone()))

    handles = [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    # The weight is used once in the step, so its .grad before clipping is this call's gradient.
    handles.append(
        module.weight.register_hook(lambda grad: seen.__setitem__("grad_inputs/weight", grad.clone()))
    )
    capture = capture_of(trainer.model, trainer.step, patterns=("layers.1.norm",))
    for handle in handles:
        handle.remove()

    (call,) = [c for c in capture.calls if c.key == "layers.1.norm"]
    stored = capture.tensors(call)
    for name, tensor in seen.items():
        assert torch.equal(stored[name], tensor), name
        assert stored[name].stride() == tensor.stride(), name
    assert call.attrs["eps"] == 1e-6
    assert call.module_class == "Norm"


def test_blobs_are_read_by_the_safetensors_library_alone(trainer: Any, capture_of: CaptureOf) -> None:
    capture = capture_of(trainer.model, trainer.step)
    blobs: dict[str, torch.Tensor] = {}
    for shard in sorted(capture.path.glob("rank_00000/*.safetensors")):
        with safe_open(shard, "pt") as file:
            blobs |= {name: file.get_tensor(name) for name in file.keys()}
    compared = 0
    for call in capture.calls:
        for record in (*call.inputs, *call.outputs, *call.params):
            if record.blob and is_row_major(record.shape, record.stride):
                assert torch.equal(blobs[record.blob].reshape(record.shape), capture.tensor(record))
                assert blobs[record.blob].dtype == getattr(torch, record.dtype)
                compared += 1
    assert compared > 100


def test_input_gradient_of_a_call_is_its_own_share(trainer: Any, capture_of: CaptureOf) -> None:
    capture = capture_of(trainer.model, trainer.step, patterns=("layers.0.norm",))
    stored = capture.tensors(capture.call("layers.0.norm"))
    x = stored["inputs/0"].clone().requires_grad_()
    weight = stored["params/weight"].clone().requires_grad_()
    y = (1 + weight) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    grad_x, grad_weight = torch.autograd.grad(y, (x, weight), stored["grad_outputs/0"])
    assert torch.equal(y, stored["outputs/0"])
    assert torch.equal(grad_weight, stored["grad_inputs/weight"])
    torch.testing.assert_close(stored["grad_inputs/0"], grad_x, rtol=1e-5, atol=1e-8)


def test_every_digest_is_that_of_the_stored_tensor(trainer: Any, capture_of: CaptureOf) -> None:
    capture = capture_of(trainer.model, trainer.step)
    checked = 0
    for call in capture.calls:
        for record in (*call.inputs, *call.outputs):
            # Dropout's mask is drawn into memory that nobody had written.
            assert record.digest is not None or (call.op, record.name) == ("aten::bernoulli_.float", "0"), (
                call.key
            )
            if record.blob and is_row_major(record.shape, record.stride):
                tensor = capture.tensor(record).contiguous()
                fresh = digest_bytes(tensor.data_ptr(), tensor.numel(), record.dtype)
                assert fresh.hash == record.digest.hash
                checked += 1
    assert checked > 100


def test_phases_keys_and_origins(trainer: Any, capture_of: CaptureOf) -> None:
    capture = capture_of(trainer.model, trainer.step, patterns=())
    calls = capture.calls
    assert [call.index for call in calls] == sorted(call.index for call in calls)
    assert len({call.key for call in calls}) == len(calls)
    phases = {call.phase for call in calls}
    assert phases == {"forward", "backward", "optimizer", "other"}
    backward = [c for c in calls if c.phase == "backward" and c.op == "aten::mm.default" and c.module]
    assert {c.module for c in backward} >= {"layers.0.up", "layers.1.down"}
    for call in backward:
        assert call.forward is not None
        origin = next(c for c in calls if c.index == call.forward)
        assert origin.phase == "forward"
        assert origin.module == call.module
        assert call.source == origin.source
    forward = next(c for c in calls if c.key == "layers.0.norm/op_0_add")
    assert forward.source is not None
    assert forward.source.endswith("in forward")
    assert "conftest.py" in forward.source
    parent = next(c for c in calls if c.index == forward.parent)
    assert parent.key == "layers.0.norm"


def test_producers_lead_through_views(capture_of: CaptureOf) -> None:
    x = torch.randn(4, 6)

    def action() -> None:
        y = x * 2
        y.t().reshape(-1).view(6, 4) + 1

    calls = {c.op: c for c in capture_of(None, action, patterns=()).calls}
    clone = calls["aten::clone.default"]
    assert clone.inputs[0].producer == calls["aten::mul.Tensor"].index
    assert calls["aten::add.Tensor"].inputs[0].producer == clone.index
    assert calls["aten::mul.Tensor"].inputs[0].producer is None


def test_in_place_writes_keep_before_and_after_apart(capture_of: CaptureOf) -> None:
    x = torch.ones(3)
    view = x[1:]

    def action() -> None:
        view.add_(1)
        x.mul_(3)

    capture = capture_of(None, action)
    add, mul = capture.find("add_")[0], capture.find("mul_")[0]
    assert capture.tensor(add.inputs[0]).tolist() == [1, 1]
    assert capture.tensor(add.outputs[0]).tolist() == [2, 2]
    assert capture.tensor(mul.inputs[0]).tolist() == [1, 2, 2]
    assert capture.tensor(mul.outputs[0]).tolist() == [3, 6, 6]
    assert add.mutated == ("0",)
    assert mul.inputs[0].producer == add.index
    assert add.outputs[0].offset == 1


@pytest.mark.parametrize("fused", [True, False])
def test_optimizer_states_before_and_after(fused: bool, capture_of: CaptureOf) -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(5))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=fused, foreach=not fused)
    parameter.grad = torch.randn(5)
    optimizer.step()
    before = parameter.detach().clone()
    capture = capture_of(None, optimizer.step)
    after = parameter.detach()
    calls = [c for c in capture.calls if c.phase == "optimizer"]
    assert calls
    values = [capture.tensor(r) for c in calls for r in c.inputs if r.shape == (5,)]
    results = [capture.tensor(r) for c in calls for r in c.outputs if r.shape == (5,)]
    assert any(torch.equal(v, before) for v in values)
    assert any(torch.equal(v, after) for v in results)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute_is_told_apart(reentrant: bool, trainer: Any, capture_of: CaptureOf) -> None:
    net = trainer.model

    def action() -> None:
        x = net.embedding(trainer.tokens)
        for layer in net.layers:
            x = checkpoint(layer, x, use_reentrant=reentrant)
        x.sum().backward()

    capture = capture_of(net, action, patterns=())
    forward = [
        c for c in capture.calls if c.module == "layers.0.up" and c.phase == "forward" and c.kind == "op"
    ]
    again = [
        c for c in capture.calls if c.module == "layers.0.up" and c.phase == "recompute" and c.kind == "op"
    ]
    assert [c.op for c in forward] == [c.op for c in again] == ["aten::addmm.default"]
    assert forward[0].outputs[0].digest == again[0].outputs[0].digest
    assert {c.module for c in capture.calls if c.phase == "recompute"} >= {"layers.0.norm", "layers.1.norm"}


def test_gradient_accumulation_counts_microbatches(trainer: Any, capture_of: CaptureOf) -> None:
    def action() -> None:
        for _ in range(3):
            trainer.loss().backward()
        trainer.optimizer.step()

    calls = capture_of(trainer.model, action, patterns=()).calls
    norms = [c for c in calls if c.module == "norm" and c.kind == "module"]
    assert [(c.key, c.microbatch) for c in norms] == [("norm", 0), ("norm#1", 1), ("norm#2", 2)]
    assert {c.microbatch for c in calls if c.phase == "backward"} == {0, 1, 2}


def test_modules_returning_tuples_and_dicts_have_gradients(capture_of: CaptureOf) -> None:
    class Pair(nn.Module):
        def forward(self, x: torch.Tensor, *, scale: float) -> tuple[torch.Tensor, dict[str, Any]]:
            return x * scale, {"twice": x * 2, "none": None}

    x = torch.randn(3, requires_grad=True)
    pair = Pair()

    def action() -> None:
        first, rest = pair(x, scale=3.0)
        (first.sum() + 5 * rest["twice"].sum()).backward()

    capture = capture_of(pair, action)
    call = capture.call("<root>")
    assert [r.name for r in call.outputs] == ["0", "1.twice"]
    assert call.attrs["scale"] == 3.0
    stored = capture.tensors(call)
    assert stored["grad_outputs/0"].tolist() == [1, 1, 1]
    assert stored["grad_outputs/1.twice"].tolist() == [5, 5, 5]
    assert stored["grad_inputs/0"].tolist() == [13, 13, 13]


def test_a_tracer_is_used_once(tmp_path: Path) -> None:
    tracer = Tracer(None, out=tmp_path / "c", step=1)
    with tracer:
        torch.ones(2) + 1
    tracer.finish()
    with pytest.raises(UsageError, match="captured step 1 already"), tracer:
        pass


def test_the_end_of_the_with_completes_it_and_finish_adds_metrics(tmp_path: Path) -> None:
    with Tracer(None, out=tmp_path / "c", step=1) as tracer:
        torch.ones(2) + 1
    capture = load_capture(tmp_path / "c")
    assert capture.complete, capture.problems
    assert len(capture.calls) == 2
    tracer.finish(metrics={"loss": 0.5})
    assert load_capture(tmp_path / "c").manifest.metrics == {"loss": 0.5}


def test_within_the_step_the_capture_is_readable_but_partial(tmp_path: Path) -> None:
    with Tracer(None, out=tmp_path / "c", step=1) as tracer:
        torch.ones(2) + 1
        assert tracer._session is not None
        tracer._session.recorder.flush()
        tracer._session._writer.drain()
        capture = load_capture(tmp_path / "c")
        assert not capture.complete
        assert any("did not finish" in text for text in capture.problems)
        assert len(capture.calls) == 2


def test_a_step_that_raises_leaves_a_partial_capture_and_its_error(tmp_path: Path) -> None:
    tracer = Tracer(None, out=tmp_path / "c", step=1)
    with pytest.raises(ZeroDivisionError), tracer:
        torch.ones(2) + 1
        raise ZeroDivisionError
    capture = load_capture(tmp_path / "c")
    assert not capture.complete
    assert any("ZeroDivisionError" in text for text in capture.problems)
    assert capture.find("add")


def test_selection_by_phase_part_and_size(trainer: Any, capture_of: CaptureOf, tmp_path: Path) -> None:
    capture = capture_of(trainer.model, trainer.step, patterns=("mm",), phases=("backward",), which="outputs")
    for call in capture.calls:
        chosen = call.phase == "backward" and call.op == "aten::mm.default"
        if chosen:
            assert all(r.blob for r in call.outputs)
    assert {c.op for c in capture.calls if any(r.blob for r in c.outputs)} >= {"aten::mm.default"}
    tracer = Tracer(
        None, out=tmp_path / "small", step=1, selection=Selection(patterns=("*",), max_tensor_bytes=100)
    )
    with tracer:
        torch.ones(1000) + torch.ones(1)
    small = load_capture(tracer.finish())
    assert {d.reason for d in small.manifest.dropped} == {"larger than 100 bytes"}
    assert small.find("add")[0].inputs[1].blob
    assert not small.find("add")[0].inputs[0].blob


def test_the_budget_is_a_cap_and_what_it_drops_is_listed(tmp_path: Path) -> None:
    tracer = Tracer(None, out=tmp_path / "c", step=1, selection=Selection(patterns=("*",)), budget_bytes=5000)
    with tracer:
        x = torch.randn(500)
        for _ in range(5):
            x = x + 1
    capture = load_capture(tracer.finish())
    assert capture.manifest.stored_bytes <= 5000
    assert len(capture.manifest.dropped) >= 3
    assert all("budget" in d.reason for d in capture.manifest.dropped)
