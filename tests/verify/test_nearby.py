"""Small cases move to the host whole: layout, surroundings and bits."""

from __future__ import annotations

import pytest
import torch

from bridge.verify.case import Case
from bridge.verify.execute import Result
from bridge.verify.nearby import beside, near_case, near_result


def _case(device: str, size: int = 8) -> Case:
    whole = torch.arange(4.0 * size, device=device).reshape(4, size)
    return Case(
        name="c", family="layout", dtype="float32", inputs=(whole[:, 1::2],), attrs={}, grad_outputs=(whole,)
    )


def test_a_case_on_the_host_is_itself() -> None:
    case = _case("cpu")
    assert near_case(case) is case


def test_a_result_elsewhere_is_not_beside() -> None:
    case = _case("cpu")
    assert beside(Result(outputs={"y": torch.ones(2)}), case)
    assert not beside(Result(outputs={"y": torch.ones(2, device="meta")}), case)
    assert not beside(Result(grads={"x": torch.ones(2, device="meta"), "w": None}), case)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_small_case_moves_with_its_layout() -> None:
    case = _case("cuda")
    near = near_case(case)
    assert near.inputs[0].device.type == "cpu"
    assert near.inputs[0].stride() == case.inputs[0].stride()
    assert near.inputs[0].storage_offset() == case.inputs[0].storage_offset()
    assert torch.equal(near.inputs[0], case.inputs[0].cpu())
    moved = near_result(Result(outputs={"y": case.inputs[0]}), near)
    assert moved.outputs["y"].device.type == "cpu"
    large = _case("cuda", size=1 << 16)
    assert near_case(large) is large
