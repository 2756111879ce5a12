"""What single operators promise beyond their specs: edge values, options, words for wrong arguments."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bridge.errors import KernelError, UsageError
from bridge.kernels._dispatch import KernelFallbackWarning, warn_fallback
from bridge.kernels.adamw.op import adamw_step
from bridge.kernels.adamw.optimizer import KernelAdamW
from bridge.kernels.adamw.reference import reference as adamw_reference
from bridge.kernels.cross_entropy.op import cross_entropy
from bridge.kernels.cross_entropy.spec import PLAIN
from bridge.kernels.fused_swiglu.op import swiglu
from bridge.kernels.geglu.op import geglu
from bridge.kernels.geglu.spec import ERF
from bridge.kernels.layer_norm.op import layer_norm
from bridge.kernels.rope.op import rope
from bridge.kernels.rope.spec import INTERLEAVED
from bridge.kernels.rope.table import rotary_table
from bridge.kernels.softmax.op import softmax
from bridge.verify import KernelSpec


def _normal(gate: SimpleNamespace, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(gate.device)


@pytest.mark.parametrize("spec", [ERF, INTERLEAVED, PLAIN], ids=lambda spec: spec.name)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_variants(gate: SimpleNamespace, spec: KernelSpec, dtype: str) -> None:
    """The specs that stand beside SPEC in a file, on every adversarial family."""
    shape = spec.shapes[1]
    for family in (None, *spec.adversarial):
        gate.judge(spec, gate.draw(spec, shape, getattr(torch, dtype), seed=3, family=family))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_reductions_are_torchs(gate: SimpleNamespace, reduction: str, smoothing: float) -> None:
    logits = _normal(gate, 6, 33)
    target = torch.tensor([0, 32, -100, 5, 7, 7], device=gate.device)
    ours = cross_entropy(logits, target, reduction=reduction, label_smoothing=smoothing, backend="kernel")
    theirs = torch.nn.functional.cross_entropy(logits, target, reduction=reduction, label_smoothing=smoothing)
    torch.testing.assert_close(ours, theirs)


def test_cross_entropy_of_rows_that_do_not_count(gate: SimpleNamespace) -> None:
    """An ignored row costs nothing, even when its logits are NaN; a label that is no class is NaN."""
    logits = _normal(gate, 3, 20)
    logits[1] = torch.nan
    logits.requires_grad_()
    target = torch.tensor([4, -100, 20], device=gate.device)
    loss = cross_entropy(logits, target, reduction="none", backend="kernel")
    assert loss[0].isfinite() and loss[1] == 0.0 and loss[2].isnan()
    (grad,) = torch.autograd.grad(loss[:2].sum(), logits)
    assert grad.isfinite().all() and not grad[1].any()
    nothing = torch.full((3,), -100, device=gate.device)
    assert cross_entropy(logits.detach(), nothing, backend="kernel").isnan()


def test_cross_entropy_of_a_confident_model_keeps_its_digits(gate: SimpleNamespace) -> None:
    """p = 1 - 2e-9: the loss and the gradient of the true class are that small, not zero."""
    logits = torch.zeros(1, 2, device=gate.device)
    logits[0, 0] = 20.0
    logits.requires_grad_()
    loss = cross_entropy(logits, torch.tensor([0], device=gate.device), backend="kernel")
    (grad,) = torch.autograd.grad(loss, logits)
    assert float(loss.detach()) == pytest.approx(2.0611536e-9, rel=1e-5)
    assert float(grad[0, 0]) == pytest.approx(-2.0611536e-9, rel=1e-5)


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_softmax_over_any_axis(gate: SimpleNamespace, dim: int) -> None:
    x = _normal(gate, 4, 5, 6)
    torch.testing.assert_close(softmax(x, dim=dim, backend="kernel"), torch.softmax(x, dim))


def test_softmax_of_masked_rows_is_torchs(gate: SimpleNamespace) -> None:
    x = _normal(gate, 3, 6)
    x[0] = float("-inf")
    x[1, 2] = torch.nan
    ours, theirs = softmax(x, backend="kernel"), torch.softmax(x, -1)
    torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_rope_outside_its_table_is_nan(gate: SimpleNamespace) -> None:
    cos, sin = rotary_table(8, 4, theta=10000.0, device=gate.device)
    x = _normal(gate, 3, 2, 6)
    y = rope(x, cos, sin, torch.tensor([7, 8, -1], device=gate.device), backend="kernel")
    assert y[0].isfinite().all() and y[1:, :, :4].isnan().all()
    assert torch.equal(y[..., 4:], x[..., 4:])


def test_rotary_tables_stay_right_at_long_positions() -> None:
    """At position 10^6 an fp32 angle is off by 0.03 rad; the table is off by half an ulp."""
    cos, sin = rotary_table(3, 64, theta=10000.0, offset=1_000_000)
    position = torch.arange(1_000_000, 1_000_003, dtype=torch.float64)
    angles = torch.outer(position, 10000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64))
    assert (cos.double() - angles.cos()).abs().max() < 6e-8
    assert (sin.double() - angles.sin()).abs().max() < 6e-8


OPTIONS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "step": 3}


def test_adamw_writes_through_strides(gate: SimpleNamespace) -> None:
    """A transposed parameter and a state cut out of a wider buffer are updated where they lie."""
    param = _normal(gate, 5, 7).t()
    grad, mean = _normal(gate, 7, 5), _normal(gate, 7, 9)[:, 2:7]
    square = _normal(gate, 7, 5).square()
    expected = adamw_reference(param, grad, mean, square, **OPTIONS)  # type: ignore[arg-type]
    adamw_step(param, grad, mean, square, backend="kernel", **OPTIONS)  # type: ignore[arg-type]
    for place, value in zip((param, mean, square), expected, strict=True):
        torch.testing.assert_close(place, value, rtol=1e-6, atol=1e-7)


def test_adamw_class_is_torchs_over_ten_steps(gate: SimpleNamespace) -> None:
    models = [torch.nn.Linear(6, 4).to(gate.device) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    options = {"lr": 3e-2, "betas": (0.8, 0.95), "weight_decay": 0.2}
    optimizers = [
        torch.optim.AdamW(models[0].parameters(), **options),  # type: ignore[arg-type]
        KernelAdamW(models[1].parameters(), fused=True, **options),
    ]
    x = _normal(gate, 9, 6)
    for _ in range(10):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for one, two in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-6)


def test_adamw_class_refuses_what_it_does_not_do(gate: SimpleNamespace) -> None:
    def parameter() -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.ones(2, 3, device=gate.device))

    with pytest.raises(UsageError, match="no amsgrad"):
        KernelAdamW([parameter()], amsgrad=True)
    optimizer = KernelAdamW([parameter()])
    with pytest.raises(UsageError, match="no maximize"):
        optimizer.add_param_group({"params": [parameter()], "maximize": True})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(UsageError, match="no amsgrad"):
        optimizer.load_state_dict(torch.optim.AdamW([parameter()], amsgrad=True).state_dict())
    sparse = parameter()
    sparse.grad = torch.ones(2, 3, device=gate.device).to_sparse()
    with pytest.raises(KernelError, match=r"needs strided tensors, got torch\.sparse_coo"):
        KernelAdamW([sparse]).step()


def test_adamw_class_takes_what_torchs_takes_and_survives_a_copy() -> None:
    optimizer = KernelAdamW([torch.nn.Parameter(torch.ones(2))], 0.25, (0.5, 0.75), backend="auto")
    for again in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert again.backend == "auto"
        assert (again.param_groups[0]["lr"], again.param_groups[0]["betas"]) == (0.25, (0.5, 0.75))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: swiglu(x, x[:1]), r"one shape .* got \(2, 4\) torch.float32 and \(1, 4\)"),
        (lambda x: geglu(x, x, approximate="fast"), '"none" or "tanh", got \'fast\''),
        (lambda x: layer_norm(x, x[0], x[0, :2], eps=1e-5), r"weight \(4,\) and bias \(2,\)"),
        (lambda x: softmax(x, dim=2), r"dim between -2 and 1 for x \(2, 4\), got 2"),
        (lambda x: softmax(x[0, 0]), "at least one axis"),
        (lambda x: cross_entropy(x, x[:, 0]), "int64 target"),
        (lambda x: cross_entropy(x, x[:, 0].long(), reduction="max"), "none, sum, mean"),
        (lambda x: cross_entropy(x[:, :0], x[:, 0].long()), r"classes >= 1\], got logits \(2, 0\)"),
        (lambda x: rope(x, x, x, x[0].long()), "rope needs cos"),
        (lambda x: rope(x[None], x, x, x[0, :1]), r"int64 or int32 positions .* \(1,\) torch.float32"),
        (lambda x: adamw_step(x, x[:1], x, x, **OPTIONS), "four tensors of one shape"),
        (lambda x: adamw_step(x, x, x, x, **{**OPTIONS, "step": 0}), "step >= 1"),
    ],
)
def test_wrong_arguments_are_named(call: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call(torch.ones(2, 4))  # type: ignore[operator]


def _far(values: torch.Tensor) -> torch.Tensor:
    """`values` `[2, 4]` whose last column begins 2^31 elements on; what lies between is never touched."""
    stride = 3 * 2**28
    buffer = torch.empty(3 * stride + 2, dtype=values.dtype, device=values.device)
    return buffer.as_strided((2, 4), (1, stride)).copy_(values)


def test_column_offsets_beyond_2_to_the_31(gate: SimpleNamespace) -> None:
    values, other = _normal(gate, 2, 4).half(), _normal(gate, 2, 4).half()
    far = _far(values)
    cos, sin = rotary_table(8, 4, theta=10000.0, device=gate.device)
    turn = partial(rope, cos=cos, sin=sin, positions=torch.ones(1, device=gate.device, dtype=torch.int64))
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "swiglu gate": lambda x: swiglu(x, other, backend="kernel"),
        "swiglu up": lambda x: swiglu(other, x, backend="kernel"),
        "geglu gate": lambda x: geglu(x, other, backend="kernel"),
        "geglu up": lambda x: geglu(other, x, backend="kernel"),
        "rope halves": lambda x: turn(x[None], backend="kernel"),
        "rope neighbours": lambda x: turn(x[None], interleaved=True, backend="kernel"),
    }
    for name, function in functions.items():
        results = []
        for x in (far, values):
            leaf = x.detach().requires_grad_()
            y = function(leaf)
            results.append((y, *torch.autograd.grad(y, leaf, x.reshape(y.shape))))
        for one, two in zip(*results, strict=True):
            assert torch.equal(one, two), name


@pytest.mark.parametrize(
    "call",
    [
        lambda x, there: cross_entropy(x, there, backend="kernel"),
        lambda x, there: rope(x[:, None], x[:, :2], x[:, :2], there, backend="kernel"),
    ],
    ids=["cross_entropy", "rope"],
)
def test_indices_on_another_device_are_refused(gate: SimpleNamespace, call: Callable[..., Any]) -> None:
    """A kernel that follows an address of another device reads what it should not, or is never run."""
    with pytest.raises(KernelError, match=r"(share one device|needs CUDA), got .*meta"):
        call(_normal(gate, 3, 4), torch.zeros(3, dtype=torch.int64, device="meta"))


def test_a_tangent_is_not_dropped(gate: SimpleNamespace) -> None:
    """Forward mode, which no kernel has a formula for: refused, or computed by the eager formula."""
    x, tangent = _normal(gate, 3, 5), torch.ones(3, 5, device=gate.device)
    with pytest.raises(KernelError, match="no forward-mode derivative"):
        torch.func.jvp(partial(softmax, backend="kernel"), (x,), (tangent,))
    with pytest.warns(KernelFallbackWarning, match="no forward-mode derivative"):
        warn_fallback.cache_clear()
        found = torch.func.jvp(softmax, (x,), (tangent,))
    for one, two in zip(found, torch.func.jvp(partial(torch.softmax, dim=-1), (x,), (tangent,)), strict=True):
        torch.testing.assert_close(one, two)
