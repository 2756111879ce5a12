"""What a target does to memory that is not its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from bridge.verify import KernelSpec
from bridge.verify.execute import Result, run_target
from bridge.verify.judge import judge
from bridge.verify.options import Options
from bridge.verify.plan import plan_cases
from tests.verify.corpus.pairs import full, normal

PLAIN = Options(sweeps=False, power=False, repeats=1)


def _spec(target: Callable[..., Any], grads: tuple[str, ...]) -> KernelSpec:
    return KernelSpec(
        name="double",
        reference=lambda x: 2 * x,
        target=target,
        sample=normal(full),
        inputs=("x",),
        grads=grads,
        outputs=("y",),
        kind="elementwise",
        shapes=((4, 16),),
        dtypes=("float32",),
    )


def _in_place(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2)


def _through_a_view(x: torch.Tensor) -> torch.Tensor:
    x.view(-1).mul_(2)
    return x


@pytest.mark.parametrize("grads", [(), ("x",)], ids=["without gradients", "with gradients"])
@pytest.mark.parametrize("target", [_in_place, _through_a_view])
def test_a_target_that_writes_its_input_fails_and_is_told_so(
    target: Callable[..., Any], grads: tuple[str, ...]
) -> None:
    spec = _spec(target, grads)
    found = judge(spec, plan_cases(spec, options=PLAIN), options=PLAIN)
    assert found.outcome == "FAIL"
    assert {t.tensor for t in found.tensors if t.verdict == "FAIL"} == {"y", *(f"grad_{g}" for g in grads)}
    assert all("the input `x` was written to" in t.reason for t in found.tensors)
    assert found.diagnosis is not None and "overwrites its input in place" in found.diagnosis.cause


class _Doubled(torch.autograd.Function):
    """Doubles its argument where it lies, and so its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0].contiguous().mul_(2)


def test_a_view_of_its_own_memory_may_be_written_in_place() -> None:
    """Autograd makes the gradient of such a view in a buffer, which it takes to begin its storage."""
    spec = _spec(lambda x: _Doubled.apply((x * 1).view(-1, 2, 4)).view(x.shape), ("x",))
    found = judge(spec, plan_cases(spec, options=PLAIN), options=PLAIN)
    assert found.outcome == "PASS", [t.reason for t in found.tensors]


def test_another_error_of_autograd_is_told_as_it_is() -> None:
    def target(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a view was created in no_grad mode")

    spec = _spec(target, ("x",))
    found = judge(spec, plan_cases(spec, options=PLAIN), options=PLAIN)
    assert all("RuntimeError: a view was created" in str(t.structure) for t in found.tensors)


def test_run_to_run_differences_are_told_and_judged_one_by_one() -> None:
    runs = []

    def unsteady(size: float) -> Callable[[torch.Tensor], torch.Tensor]:
        def target(x: torch.Tensor) -> torch.Tensor:
            runs.append(1)
            return 2 * x * (1 + (size if len(runs) % 2 else 0.0))

        return target

    options = Options(sweeps=False, power=False, repeats=3)
    for size, outcome in ((1.2e-7, "PASS"), (1e-3, "FAIL")):
        spec = _spec(unsteady(size), ())
        found = judge(spec, plan_cases(spec, options=options), options=options)
        assert found.outcome == outcome
        assert any("nondeterministic: y" in note for note in found.cases[0].notes)
    assert "run to run" not in found.summary and len(found.summary) <= 160


@pytest.mark.parametrize("step", [0.0, 1.0])
def test_gradients_in_memory_of_the_kernels_own_are_read_before_they_are_written_again(
    monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    """A second backward that writes where the first one did, as large results are not copied."""
    monkeypatch.setattr("bridge.verify.bits._PIECE", 8)
    buffer, count = torch.empty(4, 16), [0]

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            count[0] += 1
            return buffer.copy_(2 * grad + step * count[0])

    spec = _spec(Own.apply, ("x",))
    result = run_target(spec, plan_cases(spec, options=PLAIN)[0], twice=True)
    assert isinstance(result, Result)
    assert list(result.doubted) == (["grad_x"] if step else [])


@pytest.mark.parametrize("large_bytes", [1, 4 << 20], ids=["large", "small"])
def test_results_on_another_device_fail_by_their_structure(large_bytes: int) -> None:
    """The meta device, since every machine has it; its tensors have no values to compare."""
    spec = _spec(lambda x: torch.empty_like(x, device="meta"), ("x",))
    options = Options(sweeps=False, power=False, repeats=3, large_bytes=large_bytes)
    found = judge(spec, plan_cases(spec, options=options), options=options)
    assert found.outcome == "FAIL"
    y = next(t for t in found.tensors if t.tensor == "y")
    assert "device must be cpu as the reference's, got meta" in y.reason


@pytest.mark.parametrize(
    ("shape", "failed"),
    [((-1, 1), {"mean"}), ((2, -1), {"mean"}), (None, {"mean", "grad_x"})],
    ids=["one axis more", "folded", "half of it"],
)
def test_a_result_of_another_shape_fails_beside_its_gradients(
    shape: tuple[int, ...] | None, failed: set[str]
) -> None:
    def target(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean = x.mean(-1)
        return 2 * x, (mean.reshape(shape) if shape is not None else mean[::2])

    spec = replace(_spec(target, ("x",)), outputs=("y", "mean"), kind="reduction")
    spec = replace(spec, reference=lambda x: (2 * x, x.mean(-1)))
    found = judge(spec, plan_cases(spec, options=PLAIN), options=PLAIN)
    assert {t.tensor for t in found.tensors if t.verdict == "FAIL"} == failed
    assert any("shape must be (4,) as the reference's" in t.reason for t in found.tensors)
    assert found.diagnosis is not None and "shape must be (4,)" in found.diagnosis.cause
