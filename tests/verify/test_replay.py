"""Does the replayed target give what the run recorded?"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bridge.verify import fallback, provenance, replay
from bridge.verify.case import Case, Recorded
from bridge.verify.recorded import only_recorded
from bridge.verify.spec import KernelSpec


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def near_double(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1e-6


class Noisy:
    """Differs from run to run by up to `size`, as atomics do."""

    def __init__(self, size: float) -> None:
        self.size = size
        self.turn = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.turn += 1
        return x * 2 + self.size * (self.turn % 3 - 1)


def make_spec(target: Any) -> KernelSpec:
    return KernelSpec(
        name="double", reference=double, target=target, sample=lambda *_: (torch.ones(4),), inputs=("x",),
        grads=("x",), outputs=("y",), kind="elementwise", shapes=((4,),), dtypes=("float32",),
    )  # fmt: skip


def make_case(y: torch.Tensor | None, grad: torch.Tensor | None = None) -> Case:
    x = torch.arange(4.0)
    record = None if y is None else Recorded(outputs={"y": y}, grads={} if grad is None else {"x": grad})
    return Case(
        name="captured c", family="captured", dtype="float32", inputs=(x,), attrs={},
        grad_outputs=(torch.ones(4),), recorded=record,
    )  # fmt: skip


def run(target: Any, y: torch.Tensor | None, grad: torch.Tensor | None = None) -> replay.Replayed | None:
    return replay.replay(make_spec(target), make_case(y, grad))


Y = 2 * torch.arange(4.0)


def test_equal_bits_of_outputs_and_gradients() -> None:
    found = run(double, Y, torch.full((4,), 2.0))
    assert found is not None and found.status == "bit-equal"
    assert found.detail == "y, grad_x bit-equal"


def test_a_call_without_record_is_no_evidence() -> None:
    assert run(double, None) is None


def test_a_difference_within_the_kernels_own_spread() -> None:
    found = run(Noisy(0.5), Y + 0.25)
    assert found is not None and found.status == "within spread"
    assert "between 3 replays by" in found.detail


def test_a_difference_beyond_it_says_by_how_much() -> None:
    found = run(double, Y + 1)
    assert found is not None and found.status == "differs"
    assert "y differs from the record by 1," in found.detail


def test_a_run_that_was_eager_is_recognised() -> None:
    found = run(near_double, Y)
    assert found is not None and found.status == "differs"
    assert "this run did not use the kernel here" in found.detail


def summary(items: list[replay.Replayed], **changes: Any) -> Any:
    given: dict[str, Any] = {
        "captured": 0,
        "captured_on": "",
        "here": "cpu",
        "kernels": ("k",),
        "recorded": False,
    }
    return replay.summarise(items, **{**given, **changes})


def test_the_worst_call_is_told_with_the_devices() -> None:
    items = [
        replay.Replayed(case="a", status="bit-equal", detail="fine"),
        replay.Replayed(case="b", status="differs", detail="by 1"),
    ]
    found = summary(items, captured=2, captured_on="NVIDIA H200")
    assert (found.status, found.launched) == ("differs", True)
    assert "1 of 2 captured calls reproduced bit for bit; b: by 1; captured on NVIDIA H200" in found.detail
    none = summary([], kernels=())
    assert (none.status, none.launched) == ("no capture", False)
    judged = summary([], captured=1, recorded=True)
    assert judged.status == "recorded"
    assert "nothing that the kernel's own outputs" in summary([], captured=1).detail


@pytest.mark.parametrize(
    ("a", "b", "gap"),
    [
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.5, float("nan")]), 0.5),
        (torch.tensor([1.0]), torch.tensor([float("inf")]), float("inf")),
        (torch.ones(2), torch.ones(3), float("inf")),
        (torch.ones(0), torch.ones(0), 0.0),
    ],
)
def test_distance(a: torch.Tensor, b: torch.Tensor, gap: float) -> None:
    assert replay.distance(a, b) == gap


def test_operators_of_an_eager_target_are_named() -> None:
    assert fallback.eager_operators(make_spec(near_double), make_case(None)) == ("aten::mul", "aten::add")
    assert (
        fallback.eager_operators(
            make_spec(lambda x: x.clone().view(2, 2).t().contiguous().view(4)), make_case(None)
        )
        == ()
    )


def test_recorded_targets_keep_what_every_call_has() -> None:
    from bridge.capture.record import Call
    from bridge.errors import UsageError
    from bridge.verify.bind import Bindings, BoundCall

    call = Call(index=0, key="k", kind="module", op="Double", step=1)

    def bound(*names: str) -> BoundCall:
        return BoundCall(call=call, name="c", recorded=frozenset(names), load=lambda: make_case(None))

    spec, left = only_recorded(make_spec(double), Bindings(bound=(bound("y", "grad_x"), bound("y"), bound())))
    assert spec.grads == () and len(left.bound) == 2
    assert "grad_x: the run recorded no such gradient" in left.left_out
    assert "1 call without recorded outputs" in left.left_out
    with pytest.raises(UsageError, match="recorded no outputs of double"):
        only_recorded(make_spec(double), Bindings(bound=(bound("grad_x"),)))


def test_a_target_that_returns_no_tensor_is_not_replayed() -> None:
    """The judge has told what it returned; replay has nothing to compare."""
    x = torch.ones(2)
    spec = KernelSpec(
        name="none",
        reference=lambda x: x * 2,
        target=lambda x: None,
        sample=lambda shape, dtype, generator, device: (torch.ones(shape, dtype=dtype),),
        inputs=("x",),
        outputs=("y",),
        kind="elementwise",
        shapes=((2,),),
        dtypes=("float32",),
    )
    recorded = Recorded(outputs={"y": x * 2}, grads={})
    case = Case(name="c", family="captured", dtype="float32", inputs=(x,), attrs={}, recorded=recorded)
    assert replay.replay(spec, case) is None


def test_a_stride_that_no_element_uses_can_be_digested() -> None:
    odd = torch.ones(4)[::2][:1].as_strided((1, 1), (2, 2))
    assert provenance.tensor_digest(odd).startswith("float32[1, 1]:")
