"""A fused optimizer step over lists of tensors, judged one parameter at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bridge.capture import Tracer, load_capture
from bridge.capture.record import Call, TensorRecord
from bridge.capture.select import Selection
from bridge.errors import SpecError, UsageError
from bridge.verify.items import items
from bridge.verify.registry import prepare_triton
from bridge.verify.request import Request
from bridge.verify.session import execute


def _record(name: str, size: int = 2) -> TensorRecord:
    return TensorRecord(name=name, dtype="float32", shape=(size,))


def _call(inputs: list[str], outputs: tuple[str, ...] = (), mutated: tuple[str, ...] = ()) -> Call:
    return Call(
        index=7,
        key="<none>/op_1_step",
        kind="op",
        op="aten::step",
        step=3,
        phase="optimizer",
        inputs=tuple(map(_record, inputs)),
        outputs=tuple(map(_record, outputs)),
        mutated=mutated,
    )


def test_lists_are_taken_apart_and_single_tensors_belong_to_all() -> None:
    whole = _call(["0.0", "0.1", "1.0", "1.1", "lr"], ("0.0", "0.1"), ("0.0", "0.1"))
    first, second = items(whole)
    assert (first.key, second.key) == ("<none>/op_1_step[0]", "<none>/op_1_step[1]")
    for item in (first, second):
        assert [record.name for record in item.inputs] == ["0", "1", "lr"]
        assert [record.name for record in item.outputs] == ["0"]
        assert item.mutated == ("0",) and item.index == whole.index


@pytest.mark.parametrize("inputs", [["0", "1"], ["0.0", "0.1", "1.0"], ["query.weight"]])
def test_other_calls_stay_whole(inputs: list[str]) -> None:
    call = _call(inputs)
    assert items(call) == (call,)


def _capture(
    out: Path, ops: str = "aten::_fused_adamw_", optimizer: Any = torch.optim.AdamW, **options: Any
) -> Path:
    """The third step of AdamW, torch's fused one by default, on a small model, with the tensors of `ops`."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    optimizer = optimizer(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True, **options)
    x = torch.randn(4, 6)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    step()
    step()
    tracer = Tracer(model, out=out, step=3, selection=Selection(patterns=(ops,)))
    with tracer:
        step()
    tracer.finish()
    return out


def test_every_parameter_of_the_step_is_a_case_from_the_run(tmp_path: Path) -> None:
    capture = _capture(tmp_path / "capture")
    verdict = execute(Request(op="adamw", capture=str(capture), sweep=False, max_calls=10))
    assert verdict.verdict == "PASS", verdict.summary
    assert sorted(tuple(case.shapes[0]) for case in verdict.cases) == [(3,), (3, 5), (5,), (5, 6)]
    assert {case.family for case in verdict.cases} == {"captured"}
    call = next(call for call in load_capture(capture).calls if call.op.startswith("aten::_fused_adamw_"))
    assert call.phase == "optimizer"


def test_a_step_of_our_own_kernel_is_replayed_bit_for_bit(tmp_path: Path) -> None:
    prepare_triton()
    from bridge.kernels.adamw.optimizer import KernelAdamW

    capture = _capture(tmp_path / "capture", ops="bridge::adamw_step", optimizer=KernelAdamW)
    verdict = execute(Request(op="adamw", capture=str(capture), sweep=False, max_calls=10))
    assert verdict.verdict == "PASS", verdict.summary
    assert len(verdict.cases) == 4 and verdict.fidelity.status == "bit-equal"
    recorded = execute(Request(op="adamw", capture=str(capture), sweep=False, target="recorded"))
    assert recorded.verdict == "PASS", recorded.summary
    assert {e.tensor for e in recorded.tensors} == {"new_param", "new_exp_avg", "new_exp_avg_sq"}


def test_inputs_are_those_before_the_step(tmp_path: Path) -> None:
    """A kernel that does nothing would pass on tensors that were recorded after it."""
    kernel = tmp_path / "idle.py"
    kernel.write_text(
        "import dataclasses\n"
        "from bridge.kernels.adamw.spec import SPEC as right\n"
        "def idle(param, grad, exp_avg, exp_avg_sq, **options):\n"
        "    return param.clone(), exp_avg.clone(), exp_avg_sq.clone()\n"
        "SPEC = dataclasses.replace(right, target=idle)\n"
    )
    capture = _capture(tmp_path / "capture")
    verdict = execute(Request(kernel=str(kernel), capture=str(capture), sweep=False))
    assert verdict.verdict == "FAIL"
    assert {e.tensor for e in verdict.tensors if e.verdict == "FAIL"} == {
        "new_param", "new_exp_avg", "new_exp_avg_sq",
    }  # fmt: skip


def test_a_step_that_the_kernel_has_not_is_refused(tmp_path: Path) -> None:
    capture = _capture(tmp_path / "capture", amsgrad=True)
    with pytest.raises(SpecError, match="the step has amsgrad, which the kernel has not"):
        execute(Request(op="adamw", capture=str(capture), sweep=False))


def test_a_run_without_such_a_step_says_what_was_looked_for(tmp_path: Path) -> None:
    capture = _capture(tmp_path / "capture", ops="Linear")
    with pytest.raises(UsageError, match="recapture with --ops adamw"):
        execute(Request(op="adamw", capture=str(capture), sweep=False))
