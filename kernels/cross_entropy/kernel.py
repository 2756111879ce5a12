"""Cross-entropy in Triton, forward and backward: one program a row, which walks the classes in chunks.

The forward keeps a running maximum and a running sum of exponentials, without the true class: for a confident
model the sum is 1 plus very little, and that little is both the loss and the gradient of the true class. The
backward computes the probabilities again from the logits, in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bridge.kernels._launch import (
    INTERPRETED,
    as_rows,
    column_block,
    kernel_op,
    narrow,
    warps_for,
    widen,
    wrap_triton,
)
from bridge.kernels._math import exp, exp_in_sum, log1p, scalar

__all__ = ["INTERPRETED", "cross_entropy", "cross_entropy_backward"]

_CHUNK = 4096
_WARP_CHUNK = 512
_MANY_ROWS = 4096


@triton.jit
def cross_entropy_forward_kernel(
    logits_ptr, target_ptr, loss_ptr, peak_ptr, scale_ptr, others_ptr,
    classes, logits_stride, ignore_index, smoothing,
    SMOOTH: tl.constexpr, PRECISE: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, ADJACENT: tl.constexpr,
):  # fmt: skip
    """One row: its loss, and in fp32 peak, scale and the probability of all classes but the true one.

    The probability of a class is exp(logit - peak) * scale. The logits are read once: where a chunk has a new
    maximum, the sums so far are brought to it.
    """
    row = tl.program_id(0)
    # A row offset can pass 2^31 elements.
    base = logits_ptr + row.to(tl.int64) * logits_stride
    label = tl.load(target_ptr + row)
    # Columns that one thread holds share a maximum and a sum, so that threads need not hear of each other
    # before the row ends: `GROUP` neighbours, or so many columns each a whole group of threads apart.
    GROUPS: tl.constexpr = BLOCK // GROUP
    if ADJACENT:
        column = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    else:
        column = tl.arange(0, GROUPS)[:, None] + tl.arange(0, GROUP)[None, :] * GROUPS
    ahead = tl.load(base + column, mask=column < classes, other=float("-inf"))
    legal = (label >= 0) & (label < classes)
    # Columns are 32 bits wide, and so is what they are compared with.
    place = tl.where(legal, label, 0).to(tl.int32)
    peaks = tl.full([GROUPS], float("-inf"), tl.float32)
    sums = tl.zeros([GROUPS], tl.float32)
    levels = tl.zeros([GROUPS], tl.float32)
    for chunk in range(CHUNKS):
        x = widen(ahead)
        # The next chunk is under way while this one is worked on.
        start = chunk * BLOCK
        left = classes - start
        ahead = tl.load(base + start + BLOCK + column, mask=column < left - BLOCK, other=float("-inf"))
        if SMOOTH:
            levels += tl.sum(tl.where(column < left, x, 0.0), axis=1)
        higher = tl.maximum(peaks, tl.max(x, axis=1))
        # While all classes so far are -inf, (-inf) - (-inf) must not come up.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        if (place >= start) & (place < start + BLOCK):
            x = tl.where(column == place - start, float("-inf"), x)
        terms = tl.sum(exp_in_sum(x - shift[:, None], PRECISE), axis=1)
        sums = sums * exp_in_sum(peaks - shift, PRECISE) + terms
        peaks = higher
    peak = tl.max(peaks, axis=0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    others = tl.sum(sums * exp_in_sum(peaks - shift, PRECISE), axis=0)
    true = widen(tl.load(base + place))
    total = others + exp(true - shift, PRECISE)
    # All terms are positive, so nothing cancels: ln(total), how far the true class and the mean lie below the
    # peak. Where the true class is the peak, total - 1 is `others` to all its digits.
    below = peak - true
    loss = log1p(tl.where(below == 0.0, others, total - 1.0))
    if SMOOTH:
        part = scalar(smoothing)
        loss += (1.0 - part) * below + part * (peak - tl.sum(levels, axis=0) / classes)
    else:
        loss += below
    # An illegal label shows.
    loss = tl.where(legal, loss, float("nan"))
    scale = tl.div_rn(tl.zeros_like(total) + 1.0, total)
    tl.store(loss_ptr + row, tl.where(label == ignore_index, 0.0, loss))
    tl.store(peak_ptr + row, shift)
    tl.store(scale_ptr + row, scale)
    tl.store(others_ptr + row, others * scale)


@triton.jit
def cross_entropy_backward_kernel(
    grad_ptr, logits_ptr, target_ptr, peak_ptr, scale_ptr, others_ptr, grad_logits_ptr,
    classes, logits_stride, ignore_index, smoothing,
    PRECISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One chunk of one row: grad * (p - smoothed one-hot); 0 where the label is ignored."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < classes
    label = tl.load(target_ptr + row)
    place = tl.where((label >= 0) & (label < classes), label, -1).to(tl.int32)
    grad = tl.load(grad_ptr + row)
    x = widen(tl.load(logits_ptr + row * logits_stride + column, mask=inside, other=0.0))
    p = exp(x - tl.load(peak_ptr + row), PRECISE) * tl.load(scale_ptr + row)
    part = scalar(smoothing)
    share = part / classes
    # For the true class, p - 1 is minus the probability of all others, which is known to all its digits.
    excess = tl.where(column == place, part - tl.load(others_ptr + row), p)
    grad_logits = tl.where(label == ignore_index, 0.0, grad * (excess - share))
    at = grad_logits_ptr + row * classes + column
    tl.store(at, narrow(grad_logits, grad_logits_ptr.dtype.element_ty), mask=inside)


@kernel_op("bridge::cross_entropy")
def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, label_smoothing: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Forward.

    Args:
        logits: `[..., classes]`, any strides.
        target: `[...]` int64; a label that is neither a class nor `ignore_index` makes its loss NaN.
        ignore_index: label whose rows have loss 0.
        label_smoothing: share of the target spread evenly over all classes.

    Returns:
        loss `[...]` in fp32; peak, scale and others, each `[rows]` in fp32.
    """
    source = as_rows(logits)
    rows, classes = source.shape
    loss = torch.empty(target.shape, dtype=torch.float32, device=logits.device)
    peak = torch.empty(rows, dtype=torch.float32, device=logits.device)
    scale = torch.empty(rows, dtype=torch.float32, device=logits.device)
    others = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        # A warp a row spares it every wait for others; few rows need more to keep the memory busy.
        warps = 1 if rows >= _MANY_ROWS else 4
        block = min(_CHUNK if INTERPRETED else warps * _WARP_CHUNK, column_block(classes))
        # Where every row begins at a multiple of 16 bytes a thread loads that much at once.
        adjacent = source.stride(0) % 16 == 0 and classes % 16 == 0
        group = 16 // logits.element_size() if adjacent else max(1, block // (32 * warps))
        wrap_triton(cross_entropy_forward_kernel)[(rows,)](
            source, target.contiguous(), loss, peak, scale, others,
            classes, source.stride(0), ignore_index, label_smoothing,
            SMOOTH=label_smoothing != 0.0, PRECISE=logits.dtype == torch.float32,
            CHUNKS=triton.cdiv(classes, block), BLOCK=block, GROUP=group, ADJACENT=adjacent,
            num_warps=warps,
        )  # fmt: skip
    return loss, peak, scale, others


@kernel_op("bridge::cross_entropy_backward")
def cross_entropy_backward(
    grad: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    peak: torch.Tensor,
    scale: torch.Tensor,
    others: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> torch.Tensor:
    """Backward.

    Args:
        grad: upstream gradient of the loss, `[...]` fp32, any strides.
        logits: `[..., classes]`; not written to.
        target: `[...]` int64.
        peak, scale, others: `[rows]` fp32, from the forward.
        ignore_index: as in the forward.
        label_smoothing: as in the forward.

    Returns:
        grad_logits like `logits`, contiguous.
    """
    source = as_rows(logits)
    rows, classes = source.shape
    grad_logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if rows:
        block = min(_CHUNK, column_block(classes))
        wrap_triton(cross_entropy_backward_kernel)[(rows, triton.cdiv(classes, block))](
            grad.contiguous(), source, target.contiguous(), peak, scale, others, grad_logits,
            classes, source.stride(0), ignore_index, label_smoothing,
            PRECISE=logits.dtype == torch.float32, BLOCK=block, num_warps=warps_for(block),
        )  # fmt: skip
    return grad_logits


def _setup_context(ctx, inputs, output):
    logits, target, ctx.ignore_index, ctx.label_smoothing = inputs
    ctx.save_for_backward(logits, target, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx, grad, *_):
    grad_logits = cross_entropy_backward(grad, *ctx.saved_tensors, ctx.ignore_index, ctx.label_smoothing)
    return grad_logits, None, None, None


cross_entropy.register_autograd(_backward, setup_context=_setup_context)
