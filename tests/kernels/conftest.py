"""The plain three-way gate, written out independently of `bridge.verify`, for the kernels' own tests.

Test modules reach it through the `gate` fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Tensors = Sequence[torch.Tensor]


def run(
    function: Callable[..., Any],
    inputs: Tensors,
    grad_outputs: Tensors,
    wrt: Sequence[int],
    dtype: torch.dtype | None = None,
    **attrs: Any,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs, and gradients of the inputs at `wrt`; floating tensors go to `dtype` first when given."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    leaves = [cast(tensor).detach() for tensor in inputs]
    for index in wrt:
        leaves[index] = leaves[index].requires_grad_()
    result = function(*leaves, **attrs)
    outputs = list(result) if isinstance(result, tuple) else [result]
    if not wrt:
        return outputs, []
    grads = torch.autograd.grad(
        outputs, [leaves[index] for index in wrt], [cast(grad) for grad in grad_outputs]
    )
    return [output.detach() for output in outputs], list(grads)


def assert_gate(name: str, golden: torch.Tensor, reference: torch.Tensor, target: torch.Tensor) -> None:
    """target_error <= 2 * reference_error + rounding_floor, after structure.

    An fp32 reference is one draw among legal summation orders and can be exact by luck, so two fp32 ULP of
    the largest value are allowed on top; for 16-bit outputs that is nothing.
    """
    assert target.shape == reference.shape == golden.shape, name
    assert target.dtype == reference.dtype, name
    finite = golden.isfinite()
    lowered = golden.to(target.dtype).double()
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(kind(target), kind(reference)), f"{name}: {kind.__name__} at other places"
    finite &= target.isfinite() & lowered.isfinite()
    if not bool(finite.any()):
        return

    def error(value: torch.Tensor) -> float:
        return float((value.double() - golden)[finite].abs().max())

    floor = float((lowered - golden)[finite].abs().max())
    luck = 2.0 * torch.finfo(torch.float32).eps * float(golden[finite].abs().max())
    threshold = 2.0 * error(reference) + floor + luck
    assert error(target) <= threshold, (
        f"{name}: target error {error(target):.3g} > threshold {threshold:.3g} "
        f"(reference error {error(reference):.3g}, rounding floor {floor:.3g})"
    )


def judge(
    spec: Any, inputs: Tensors, grad_outputs: Tensors | None = None, *, seed: int = 0, **attrs: Any
) -> None:
    """Run golden, reference and target of `spec` on the same inputs and gate every output and gradient."""
    attrs = {**spec.attrs, **attrs}
    wrt = [spec.inputs.index(name) for name in spec.grads]
    if grad_outputs is None:
        generator = torch.Generator(device=DEVICE).manual_seed(seed + 1)
        outputs = run(spec.reference, inputs, (), (), **attrs)[0]
        grad_outputs = [torch.randn(o.shape, generator=generator, device=DEVICE).to(o.dtype) for o in outputs]
    golden = run(spec.golden or spec.reference, inputs, grad_outputs, wrt, torch.float64, **attrs)
    reference = run(spec.reference, inputs, grad_outputs, wrt, **attrs)
    before = [tensor.clone() for tensor in (*inputs, *grad_outputs)]
    target = run(spec.target, inputs, grad_outputs, wrt, **attrs)
    for old, now in zip(before, (*inputs, *grad_outputs), strict=True):
        assert torch.equal(old.nan_to_num(), now.nan_to_num()), "an input or upstream gradient was written to"
    names = [*spec.outputs, *(f"grad_{name}" for name in spec.grads)]
    for name, *three in zip(
        names, *(outputs + grads for outputs, grads in (golden, reference, target)), strict=True
    ):
        assert_gate(f"{spec.name} {name} {three[2].dtype} {tuple(three[2].shape)}", *three)


def draw(
    spec: Any, shape: tuple[int, ...], dtype: torch.dtype, *, seed: int = 0, family: str | None = None
) -> Tensors:
    """Inputs from the spec's `sample`, or from one of its adversarial families."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    maker = spec.sample if family is None else spec.adversarial[family]
    return maker(shape, dtype, generator, DEVICE)


@pytest.fixture(scope="session")
def gate() -> SimpleNamespace:
    """`judge`, `draw`, `run`, `assert_gate` and the device the kernels run on here."""
    return SimpleNamespace(judge=judge, draw=draw, run=run, assert_gate=assert_gate, device=DEVICE)
