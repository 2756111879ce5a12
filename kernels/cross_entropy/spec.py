"""What `bridge verify --op cross_entropy` judges, on what inputs, against which plausible faults.

`SPEC` has label smoothing, so that all terms are exercised; `PLAIN` has none (`--kernel .../spec.py:PLAIN`).
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch

from bridge.kernels.cross_entropy.op import cross_entropy
from bridge.kernels.cross_entropy.reference import golden, reference
from bridge.verify import KernelSpec

Inputs = tuple[torch.Tensor, torch.Tensor]
Device = str | torch.device
IGNORE = -100

target = partial(cross_entropy, backend="kernel")


def _draw(shape: tuple[int, ...], generator: torch.Generator, device: Device) -> Inputs:
    logits = torch.randn(shape, generator=generator, device=device)
    labels = torch.randint(0, shape[-1], shape[:-1], generator=generator, device=device)
    return logits, labels


def _some_ignored(labels: torch.Tensor) -> torch.Tensor:
    every = torch.arange(labels.numel(), device=labels.device).reshape(labels.shape)
    return labels.masked_fill(every % 4 == 3, IGNORE)


def sample(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device) -> Inputs:
    """Logits `shape` from N(0, 2); labels `shape[:-1]`, every fourth one ignored."""
    logits, labels = _draw(shape, generator, device)
    return (2.0 * logits).to(dtype), _some_ignored(labels)


def all_negative(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device
) -> Inputs:
    """Logits around -50: padded lanes that count as 0 would rule the sum."""
    logits, labels = _draw(shape, generator, device)
    return (logits - 50.0).to(dtype), _some_ignored(labels)


def confident(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device
) -> Inputs:
    """The true class leads by far: its gradient is p - 1 with p near 1."""
    logits, labels = _draw(shape, generator, device)
    logits.scatter_add_(-1, labels.unsqueeze(-1), torch.full_like(logits, 15.0))
    return logits.to(dtype), _some_ignored(labels)


def extreme(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device) -> Inputs:
    """Logits up to some thousand: exp without a shift overflows."""
    logits, labels = _draw(shape, generator, device)
    return (1000.0 * logits).to(dtype), _some_ignored(labels)


def leading_classes_masked(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device
) -> Inputs:
    """All classes but the last are -inf: whole leading chunks without a finite value."""
    logits, labels = _draw(shape, generator, device)
    logits[..., :-1] = float("-inf")
    return logits.to(dtype), _some_ignored(torch.full_like(labels, shape[-1] - 1))


def all_ignored(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: Device
) -> Inputs:
    """No row counts."""
    logits, labels = _draw(shape, generator, device)
    return logits.to(dtype), torch.full_like(labels, IGNORE)


def _fault_first_gradient_for_all(
    logits: torch.Tensor, target: torch.Tensor, *, reduction: str, **options: Any
) -> torch.Tensor:
    return _FirstGradient.apply(reference(logits, target, reduction=reduction, **options))  # type: ignore[no-any-return,no-untyped-call]


class _FirstGradient(torch.autograd.Function):
    """Passes values on; hands the first upstream gradient to every row."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (grad,) = grads
        return grad.reshape(-1)[:1].expand(grad.numel()).reshape(grad.shape)


def _fault_padding_in_sum(
    logits: torch.Tensor, target: torch.Tensor, *, reduction: str, **options: Any
) -> torch.Tensor:
    # Classes up to the next power of two exist with logit 0 and enter the log-sum-exp.
    classes = logits.shape[-1]
    extra = max(16, 1 << (classes - 1).bit_length()) - classes
    wide = logits.float()
    loss = reference(logits, target, reduction="none", **options)
    padded = torch.cat((wide, wide.new_zeros(*wide.shape[:-1], extra)), -1).logsumexp(-1)
    off = (padded - wide.logsumexp(-1)).masked_fill(target == options["ignore_index"], 0.0)
    return _reduce(loss + off, target, reduction, options["ignore_index"])


def _fault_no_shift(
    logits: torch.Tensor, target: torch.Tensor, *, reduction: str, **options: Any
) -> torch.Tensor:
    wide = logits.float()
    loss = reference(logits, target, reduction="none", **options)
    off = (wide.exp().sum(-1).log() - wide.logsumexp(-1)).masked_fill(target == options["ignore_index"], 0.0)
    return _reduce(loss + off, target, reduction, options["ignore_index"])


def _fault_ignored_rows_counted(
    logits: torch.Tensor, target: torch.Tensor, *, ignore_index: int, **options: Any
) -> torch.Tensor:
    return reference(logits, target.clamp(min=0), ignore_index=ignore_index, **options)


def _fault_smoothing_on_other_classes(
    logits: torch.Tensor, target: torch.Tensor, *, label_smoothing: float, **options: Any
) -> torch.Tensor:
    # The share is spread over the wrong classes only: the true one gets 1 - s instead of 1 - s + s / classes.
    classes = logits.shape[-1]
    other = min(label_smoothing * classes / max(classes - 1, 1), 1.0)
    return reference(logits, target, label_smoothing=other, **options)


def _fault_no_smoothing(
    logits: torch.Tensor, target: torch.Tensor, *, label_smoothing: float, **options: Any
) -> torch.Tensor:
    return reference(logits, target, label_smoothing=0.0, **options)


class _RoundedProbabilities(torch.autograd.Function):
    """Passes values on; rounds the probabilities to the dtype of the logits before 1 is taken off."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, loss: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits, target)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (grad,) = grads
        logits, target = ctx.saved_tensors
        p = torch.softmax(logits.float(), -1).to(logits.dtype).float()
        p.scatter_add_(-1, target.clamp(min=0).unsqueeze(-1), -torch.ones_like(p))
        p = p.masked_fill((target < 0).unsqueeze(-1), 0.0)
        return (grad.unsqueeze(-1) * p).to(logits.dtype), None, None


def _fault_probability_rounded(
    logits: torch.Tensor, target: torch.Tensor, *, reduction: str, **options: Any
) -> torch.Tensor:
    loss = reference(logits, target, reduction="none", **options)
    loss = _RoundedProbabilities.apply(logits, loss.detach(), target)  # type: ignore[no-untyped-call]
    return _reduce(loss, target, reduction, options["ignore_index"])


def _reduce(loss: torch.Tensor, target: torch.Tensor, reduction: str, ignore_index: int) -> torch.Tensor:
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / (target != ignore_index).sum()


SPEC = KernelSpec(
    name="cross_entropy",
    reference=reference,
    golden=golden,
    target=target,
    sample=sample,
    inputs=("logits", "target"),
    attrs={"ignore_index": IGNORE, "label_smoothing": 0.1, "reduction": "none"},
    grads=("logits",),
    outputs=("loss",),
    kind="reduction",
    # A vocabulary; one below, at and above a tile and a chunk; many rows; the smallest size with a choice.
    shapes=((4, 32000), (3, 255), (3, 256), (3, 257), (2, 4095), (2, 4096), (2, 4097), (65, 100), (1, 2)),
    dtypes=("bfloat16", "float16", "float32"),
    sites=(
        "CrossEntropyLoss",
        "bridge::cross_entropy",
        "cross_entropy_forward_kernel",
        "cross_entropy_backward_kernel",
    ),
    adversarial={
        "all-negative logits": all_negative,
        "confident": confident,
        "extreme logits": extreme,
        "leading classes masked": leading_classes_masked,
        "all ignored": all_ignored,
    },
    faults={
        "first gradient used for all rows": _fault_first_gradient_for_all,
        "zero padding in the sum": _fault_padding_in_sum,
        "no shift by the maximum": _fault_no_shift,
        "ignored rows counted": _fault_ignored_rows_counted,
        "smoothing spread over the other classes": _fault_smoothing_on_other_classes,
        "label smoothing missing": _fault_no_smoothing,
        "probability rounded before 1 is taken off": _fault_probability_rounded,
    },
)

_SMOOTHING = ("smoothing spread over the other classes", "label smoothing missing")
PLAIN = dataclasses.replace(
    SPEC,
    name="cross_entropy_plain",
    attrs={**SPEC.attrs, "label_smoothing": 0.0},
    faults={name: fault for name, fault in SPEC.faults.items() if name not in _SMOOTHING},
)
