"""What `bridge verify --op adamw` judges, on what inputs, against which plausible faults."""

from __future__ import annotations

from typing import Any

import torch

from bridge.kernels.adamw.op import adamw_step
from bridge.kernels.adamw.reference import Tensors, golden, reference
from bridge.verify import KernelSpec

Tensor = torch.Tensor
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
Device = str | torch.device


def target(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, **options: Any) -> Tensors:
    """The kernel on copies, since it works in place; never its eager fallback."""
    state = (param.clone(), exp_avg.clone(), exp_avg_sq.clone())
    adamw_step(state[0], grad, state[1], state[2], backend="kernel", **options)
    return state


def _drawn(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
    device: Device,
    scales: tuple[float, float, float, float],
) -> Inputs:
    """Param, grad and mean from N(0, 1), square from 1 + N(0, 1)^2, times their scales; one by one."""

    def one(place: int) -> Tensor:
        values = torch.randn(shape, generator=generator, device=device)
        if place == 3:
            values = values.square_().add_(1.0)
        return values.mul_(scales[place]).to(dtype)

    return one(0), one(1), one(2), one(3)


def sample(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device) -> Inputs:
    """Parameters from N(0, 1), gradients from N(0, 0.1), moments as such gradients leave them."""
    return _drawn(shape, dtype, generator, device, (1.0, 0.1, 0.03, 0.01))


def quiet(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device) -> Inputs:
    """Gradients so small that eps rules the denominator; parameters small enough to show the update."""
    return _drawn(shape, dtype, generator, device, (1e-4, 1e-7, 3e-8, 0.0))


def loud(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device) -> Inputs:
    """Gradients whose square does not fit into fp16."""
    return _drawn(shape, dtype, generator, device, (1.0, 1e3, 30.0, 100.0))


def fresh_state(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device
) -> Inputs:
    """Moments at zero, as before the first step."""
    return _drawn(shape, dtype, generator, device, (1e-3, 0.1, 0.0, 0.0))


def _fault_l2_decay(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, **options: Any
) -> Tensors:
    decay = options.pop("weight_decay")
    decayed = (grad.float() + decay * param.float()).to(grad.dtype)
    return reference(param, decayed, exp_avg, exp_avg_sq, weight_decay=0.0, **options)


def _fault_no_decay(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, **options: Any
) -> Tensors:
    return reference(param, grad, exp_avg, exp_avg_sq, **{**options, "weight_decay": 0.0})


def _fault_no_bias_correction(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, **options: Any
) -> Tensors:
    return reference(param, grad, exp_avg, exp_avg_sq, **{**options, "step": 1_000_000_000})


def _fault_step_off_by_one(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, **options: Any
) -> Tensors:
    return reference(param, grad, exp_avg, exp_avg_sq, **{**options, "step": options["step"] + 1})


def _fault_beta2_rounded(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, **options: Any
) -> Tensors:
    rounded = float(torch.tensor(options["beta2"]).to(torch.bfloat16))
    return reference(param, grad, exp_avg, exp_avg_sq, **{**options, "beta2": rounded})


def _fault_betas_swapped(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, **options: Any
) -> Tensors:
    swapped = {**options, "beta1": options["beta2"], "beta2": options["beta1"]}
    return reference(param, grad, exp_avg, exp_avg_sq, **swapped)


def _fault_eps_inside_root(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, **options: Any
) -> Tensors:
    right = reference(param, grad, exp_avg, exp_avg_sq, **options)
    beta1, beta2, step = options["beta1"], options["beta2"], options["step"]
    mean = beta1 * exp_avg.float() + (1.0 - beta1) * grad.float()
    square = beta2 * exp_avg_sq.float() + (1.0 - beta2) * grad.float().square()
    root = (square / (1.0 - beta2**step) + options["eps"]).sqrt()
    update = mean / (1.0 - beta1**step) / root
    moved = param.float() * (1.0 - options["lr"] * options["weight_decay"]) - options["lr"] * update
    return moved.to(param.dtype), right[1], right[2]


def _fault_square_in_low_precision(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, **options: Any
) -> Tensors:
    root = (grad * grad).float().sqrt()
    _, _, square = reference(param, root, exp_avg, exp_avg_sq, **options)
    moved, mean, _ = reference(param, grad, exp_avg, exp_avg_sq, **options)
    return moved, mean, square


#: torch's fused step, over the lists of a parameter group.
_TORCH_STEP = "aten::_fused_adamw_"


def bind(call: Any) -> dict[str, Any]:
    """One parameter of a captured step, ours or torch's fused one, which counts its steps in a tensor.

    Raises:
        ValueError: the step does what this kernel does not.
    """
    if call.call.kind == "launch":
        raise ValueError("a launch does not say lr and step; capture a step that is not compiled")
    param, grad, exp_avg, exp_avg_sq = (call.inputs[place] for place in "0123")
    bound = {"param": param, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    if call.call.op.startswith(_TORCH_STEP):
        extra = [name for name in ("amsgrad", "maximize") if call.attrs.get(name)]
        extra += [name for name in ("grad_scale", "found_inf") if name in call.inputs]
        if extra:
            raise ValueError(f"the step has {', '.join(extra)}, which the kernel has not")
        bound["step"] = int(call.inputs["5"])
        if "lr" in call.inputs:
            bound["lr"] = float(call.inputs["lr"])
    written = {"new_param": "0", "new_exp_avg": "2", "new_exp_avg_sq": "3"}
    return bound | {name: call.outputs[place] for name, place in written.items() if place in call.outputs}


SPEC = KernelSpec(
    name="adamw",
    reference=reference,
    golden=golden,
    target=target,
    sample=sample,
    inputs=("param", "grad", "exp_avg", "exp_avg_sq"),
    attrs={"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "step": 10},
    outputs=("new_param", "new_exp_avg", "new_exp_avg_sq"),
    kind="elementwise",
    # One below, at and above a block of 1024 elements, several blocks, a vector, and the smallest size.
    shapes=((64, 256), (33, 31), (32, 32), (25, 41), (7, 129), (1025,), (1, 1)),
    dtypes=("bfloat16", "float16", "float32"),
    sites=("bridge::adamw_step", _TORCH_STEP, "adamw_step_kernel"),
    bind=bind,
    per_item=True,
    adversarial={"quiet gradients": quiet, "loud gradients": loud, "fresh state": fresh_state},
    faults={
        "L2 penalty in place of decoupled decay": _fault_l2_decay,
        "weight decay missing": _fault_no_decay,
        "bias correction missing": _fault_no_bias_correction,
        "step off by one": _fault_step_off_by_one,
        "beta2 rounded to bfloat16": _fault_beta2_rounded,
        "betas swapped": _fault_betas_swapped,
        "eps inside the root": _fault_eps_inside_root,
        "gradient squared in low precision": _fault_square_in_low_precision,
    },
)
