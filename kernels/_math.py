"""Exponentials for Triton kernels that are right in fp32 too, on a GPU and in the interpreter.

`tl.exp` is a fast approximation on a GPU, whose error grows with its argument, and a different one in the
interpreter (2 ulp). That is nothing beside a 16-bit rounding and too much for an fp32 result, so `exp` takes
a switch. Elementwise kernels go to fp64 for fp32 tensors (`deepen`): their formulas cancel at places, and a
result that is correctly rounded is worth more there than speed.

Imported by `kernel.py` files only, because it imports triton.
"""

from __future__ import annotations

import triton.language as tl

from bridge.kernels._launch import device_function, widen


@device_function
def deepen(x, PRECISE: tl.constexpr):
    """With PRECISE the block in fp64, otherwise as it is."""
    if PRECISE:
        return x.to(tl.float64)
    else:  # noqa: RET505  (Triton compiles what follows a return as well)
        return x


@device_function
def scalar(value):
    """A floating argument in fp32; torch.compile passes it in fp64, the interpreter a number of Python."""
    return (tl.full((), 0.0, tl.float32) + value).to(tl.float32)


@device_function
def read(pointers, inside, PRECISE: tl.constexpr):
    """The block there, 0 where not inside, in the precision to calculate in: fp64 with PRECISE, else fp32."""
    return deepen(widen(tl.load(pointers, mask=inside, other=0.0)), PRECISE)


@device_function
def _precise_exp(x):
    """e^x of an fp32 block."""
    # exp(x) = 2^n exp(r) with n = round(x / ln 2), |r| <= ln(2) / 2; beyond +-110 the result is 0 or inf.
    bounded = tl.minimum(tl.maximum(x, -110.0), 110.0)
    n = tl.floor(bounded * 1.44269504088896341 + 0.5)
    # ln 2 in two parts: n times the first is exact, since n has 8 bits and the first part 16.
    # What the subtraction of the second part rounds off is kept in `rest`.
    high = bounded - n * 0.693145751953125
    low = n * 1.428606820309417e-06
    r = high - low
    rest = (high - r) - low
    p = 1.0 / 5040.0
    p = p * r + 1.0 / 720.0
    p = p * r + 1.0 / 120.0
    p = p * r + 1.0 / 24.0
    p = p * r + 1.0 / 6.0
    p = p * r + 0.5
    p = 1.0 + (r + (rest + (p * r) * r))
    # 2^n in two factors, so that neither over- nor underflows while the product is still finite.
    whole = n.to(tl.int32)
    half = whole >> 1
    first = ((half + 127) << 23).to(tl.float32, bitcast=True)
    second = ((whole - half + 127) << 23).to(tl.float32, bitcast=True)
    # tl.minimum and tl.maximum drop NaN.
    return tl.where(x != x, x, p * first * second)


@device_function
def exp(x, PRECISE: tl.constexpr):
    """e^x; of an fp32 block with PRECISE within 1 ulp at any x, gradual underflow kept."""
    if PRECISE and x.dtype == tl.float32:
        return _precise_exp(x)
    else:  # noqa: RET505  (Triton compiles what follows a return as well)
        return tl.exp(x)


@device_function
def exp_in_sum(x, PRECISE: tl.constexpr):
    """e^x where it is a term of a sum near 1: without PRECISE a result below 2^-126 is 0, which is faster."""
    if PRECISE:
        return exp(x, PRECISE)
    else:  # noqa: RET505  (Triton compiles what follows a return as well)
        return tl.exp2(x * 1.4426950408889634)


@device_function
def sigmoid(x, PRECISE: tl.constexpr):
    """1 / (1 + e^-x); no cancellation and no overflow at either end."""
    below = 1.0 + exp(-x, PRECISE)
    if PRECISE and x.dtype == tl.float32:
        # `/` is an approximation on a GPU.
        return tl.div_rn(tl.zeros_like(below) + 1.0, below)
    else:  # noqa: RET505  (Triton compiles what follows a return as well)
        return 1.0 / below


@device_function
def log1p(x):
    """ln(1 + x) of an fp32 block, x > -1, within 2 ulp of the result also where x is tiny."""
    # 1 + x = 2^n m with m in [0.70, 1.42); what the sum rounded off comes back to first order.
    whole = 1.0 + x
    lost = tl.where(x > 1.0, 1.0 - (whole - x), x - (whole - 1.0))
    shifted = whole.to(tl.int32, bitcast=True) - 0x3F330000
    n = shifted >> 23
    f = ((shifted & 0x7FFFFF) + 0x3F330000).to(tl.float32, bitcast=True) - 1.0
    # ln(1 + f) = 2 artanh(s) = 2 s + 2 s (s^2 / 3 + s^4 / 5 + ...), and 2 s = f - s f.
    s = f / (2.0 + f)
    z = s * s
    series = z * (1.0 / 3.0 + z * (1.0 / 5.0 + z * (1.0 / 7.0 + z * (1.0 / 9.0 + z * (1.0 / 11.0)))))
    return n.to(tl.float32) * 0.6931471805599453 + (lost / whole + (f - s * (f - 2.0 * series)))
