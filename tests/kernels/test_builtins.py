"""What every built-in kernel owes: right values on what it declares, in every layout, every time."""

from __future__ import annotations

import dataclasses
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bridge.kernels.cross_entropy.spec import PLAIN
from bridge.kernels.geglu.spec import ERF
from bridge.kernels.rope.spec import INTERLEAVED
from bridge.verify import KernelSpec
from bridge.verify.case import Case
from bridge.verify.judge import constants_of, judge_case
from bridge.verify.options import Options
from bridge.verify.plan import plan_cases
from bridge.verify.registry import built_in_names, load_spec

SPECS: dict[str, KernelSpec] = {name: load_spec(name).spec for name in built_in_names()}
# The interpreter takes a second for a large case, so those run in one dtype and the largest not at all.
SMALL, LARGE = 4200, 65536


def _numel(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size


def _cases() -> list[Any]:
    return [
        pytest.param(name, shape, dtype, id=f"{name}-{'x'.join(map(str, shape))}-{dtype}")
        for name, spec in SPECS.items()
        for shape in spec.shapes
        for dtype in spec.dtypes
        if _numel(shape) <= SMALL or (_numel(shape) <= LARGE and dtype == "bfloat16")
    ]


def _families() -> list[Any]:
    return [
        pytest.param(name, family, id=f"{name}-{family}")
        for name, spec in SPECS.items()
        for family in spec.adversarial
    ]


def _upstream(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """A random gradient for each output, the same in every run."""
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(o.shape, generator=generator).to(o.device, o.dtype) for o in outputs]


def _middle(spec: KernelSpec) -> tuple[int, ...]:
    """A declared shape of moderate size."""
    return min(spec.shapes, key=lambda shape: abs(_numel(shape) - 1500))


@pytest.mark.parametrize(("name", "shape", "dtype"), _cases())
def test_declared_shapes(gate: SimpleNamespace, name: str, shape: tuple[int, ...], dtype: str) -> None:
    spec = SPECS[name]
    gate.judge(spec, gate.draw(spec, shape, getattr(torch, dtype)))


@pytest.mark.parametrize(("name", "family"), _families())
def test_adversarial_families(gate: SimpleNamespace, name: str, family: str) -> None:
    spec = SPECS[name]
    for dtype in spec.dtypes:
        gate.judge(spec, gate.draw(spec, _middle(spec), getattr(torch, dtype), seed=1, family=family))


def _nan_buffer(tensor: torch.Tensor, width: int) -> torch.Tensor:
    return torch.full((*tensor.shape[:-1], width), torch.nan, dtype=tensor.dtype, device=tensor.device)


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """Equal values with every other element of a twice as wide NaN-filled buffer in between."""
    if not tensor.is_floating_point() or tensor.ndim == 0:
        return tensor
    buffer = torch.full(
        (*tensor.shape[:-1], 2 * tensor.shape[-1]), torch.nan, dtype=tensor.dtype, device=tensor.device
    )
    view = buffer[..., ::2]
    view.copy_(tensor)
    return view


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Equal values, stored with the axes in reverse order."""
    if tensor.ndim < 2:
        return tensor
    axes = tuple(reversed(range(tensor.ndim)))
    return tensor.permute(axes).contiguous().permute(axes)


def _row_sliced(tensor: torch.Tensor) -> torch.Tensor:
    """Equal values, cut out of a wider buffer that is NaN around them."""
    if not tensor.is_floating_point() or tensor.ndim == 0:
        return tensor
    width = tensor.shape[-1]
    view = _nan_buffer(tensor, width + 5)[..., 3 : 3 + width]
    view.copy_(tensor)
    return view


@pytest.mark.parametrize("layout", [_spread, _transposed, _row_sliced], ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("name", SPECS)
def test_layouts_of_inputs_and_gradients(gate: SimpleNamespace, name: str, layout: Any) -> None:
    spec = SPECS[name]
    inputs = gate.draw(spec, _middle(spec), torch.float16, seed=2)
    outputs = gate.run(spec.reference, inputs, (), (), **spec.attrs)[0]
    grads = _upstream(outputs)
    gate.judge(spec, [layout(tensor) for tensor in inputs], [layout(grad) for grad in grads])


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.grads])
def test_expanded_gradient(gate: SimpleNamespace, name: str) -> None:
    """The stride-0 gradient that `loss.sum()` sends."""
    spec = SPECS[name]
    inputs = gate.draw(spec, _middle(spec), torch.float16, seed=3)
    outputs = gate.run(spec.reference, inputs, (), (), **spec.attrs)[0]
    gate.judge(
        spec, inputs, [torch.ones((), dtype=o.dtype, device=o.device).expand(o.shape) for o in outputs]
    )


@pytest.mark.parametrize("name", SPECS)
def test_twice_the_same(gate: SimpleNamespace, name: str) -> None:
    spec = SPECS[name]
    inputs = gate.draw(spec, _middle(spec), torch.float32, seed=4)
    wrt = [spec.inputs.index(grad) for grad in spec.grads]
    outputs = gate.run(spec.reference, inputs, (), (), **spec.attrs)[0]
    grads = _upstream(outputs)
    first = gate.run(spec.target, inputs, grads, wrt, **spec.attrs)
    second = gate.run(spec.target, inputs, grads, wrt, **spec.attrs)
    for one, two in zip(first[0] + first[1], second[0] + second[1], strict=True):
        assert torch.equal(one, two)


#: Every spec of the folders, those that stand beside SPEC included.
ALL = (*SPECS.values(), ERF, INTERLEAVED, PLAIN)
QUICK = Options(power=False, repeats=1)


@cache
def _planned(name: str, device: str) -> tuple[KernelSpec, list[Case]]:
    """The spec on one shape of moderate size, and all cases of its verdict in fp16."""
    (spec,) = (spec for spec in ALL if spec.name == name)
    shape = min(spec.shapes, key=lambda shape: abs(_numel(shape) - 800))
    spec = dataclasses.replace(spec, shapes=(shape,))
    return spec, plan_cases(spec, dtypes=("float16",), device=device, options=QUICK, tiles=())


@pytest.mark.parametrize(("name", "fault"), [(spec.name, fault) for spec in ALL for fault in spec.faults])
def test_every_fault_fails(gate: SimpleNamespace, name: str, fault: str) -> None:
    """In the kernel's place each wrong formula fails on one of the cases; the first that does is enough."""
    spec, cases = _planned(name, gate.device)
    wrong = dataclasses.replace(spec, target=spec.faults[fault])
    for case in cases:
        found = judge_case(wrong, case, constants=constants_of(spec), options=QUICK)
        if found is not None and any(entry.verdict == "FAIL" for entry in found.tensors):
            return
    pytest.fail(f"fault {fault!r} of {name} passes on all {len(cases)} cases")
