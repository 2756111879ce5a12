"""Exponentials for Triton kernels, the same on a GPU and in the interpreter.

`tl.exp` is a fast approximation on a GPU, whose error grows with its argument, and a different one in the
interpreter (2 ulp). That is nothing beside a 16-bit rounding and too much for an fp32 result, so `exp` takes a
switch. Imported by `kernel.py` files only, because it imports triton.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exp(x, PRECISE: tl.constexpr):
    """e^x of an fp32 block; with PRECISE within 1 ulp at any x, and gradual underflow kept."""
    if not PRECISE:
        return tl.exp(x)
    # exp(x) = 2^n exp(r) with n = round(x / ln 2), |r| <= ln(2) / 2; beyond +-110 the result is 0 or inf.
    bounded = tl.minimum(tl.maximum(x, -110.0), 110.0)
    n = tl.floor(bounded * 1.44269504088896341 + 0.5)
    # ln 2 in two parts: n times the first is exact, since n has 8 bits and the first part 16.
    r = (bounded - n * 0.693145751953125) - n * 1.428606820309417e-06
    p = 1.0 / 5040.0
    p = p * r + 1.0 / 720.0
    p = p * r + 1.0 / 120.0
    p = p * r + 1.0 / 24.0
    p = p * r + 1.0 / 6.0
    p = p * r + 0.5
    p = (p * r) * r + r + 1.0
    # 2^n in two factors, so that neither over- nor underflows while the product is still finite.
    whole = n.to(tl.int32)
    half = whole >> 1
    first = ((half + 127) << 23).to(tl.float32, bitcast=True)
    second = ((whole - half + 127) << 23).to(tl.float32, bitcast=True)
    # tl.maximum drops NaN; adding x - x puts it back and adds 0 elsewhere, but Inf - Inf is NaN too.
    return tl.where(x != x, x, p * first * second)


@triton.jit
def sigmoid(x, PRECISE: tl.constexpr):
    """1 / (1 + e^-x) of an fp32 block; no cancellation and no overflow at either end."""
    return 1.0 / (1.0 + exp(-x, PRECISE))
