"""What a digest is, and how one is taken of bytes in host memory.

A digest is one pass over a tensor's distinct elements in memory order (`layout`): counts and sums of
the finite ones, extremes, numbers of NaN and infinities, and a 64-bit hash of the bytes:

    words x_k of 8 bytes, little endian, the last one padded with zeros; blocks of 8192 words
    y = x ^ (x >> 29)                                      the top bits must matter to the product below
    z = (j + 1) * STEP,  w_j = (z ^ (z >> 31)) | 1         weight of word j of a block
    hash = mix(sum over blocks b of (mix(b) | 1) * (sum over words j of y * w_j), number of bytes)

All arithmetic is modulo 2^64, so the sum may be taken in any order: a GPU's launch order and the number
of threads do not show. Every bit and its position count; a changed sign, a swap of two rows or a
permutation change the hash, which a norm would not see.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bridge.capture.record import Digest

MASK = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15
BLOCK_WORDS = 8192
BLOCK_BYTES = 8 * BLOCK_WORDS

#: Types that the walkers know, in the order of their codes; "byte" looks its values up in a table. The GPU
#: walks all eight-bit types that way.
KINDS = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "byte",
    "uint8",
    "int8",
)
BYTE_TYPES = ("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
              "float8_e8m0fnu")  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Sums:
    """What one walk over some bytes yields; sums of walks over parts are the walk over the whole."""

    sum: float = 0.0
    abs_sum: float = 0.0
    sq_sum: float = 0.0
    min: float = math.inf
    max: float = -math.inf
    nan: int = 0
    pos_inf: int = 0
    neg_inf: int = 0
    finite: int = 0
    hash: int = 0


def mix(z: int) -> int:
    """Scramble a 64-bit number (splitmix64)."""
    z = (z + STEP) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def finish(sums: Sums, *, count: int, nbytes: int) -> Digest:
    """The digest that the sums over all bytes of a tensor make."""
    totals = (json_safe(sums.sum), json_safe(sums.abs_sum), json_safe(sums.sq_sum))
    counts = (sums.nan, sums.pos_inf, sums.neg_inf)
    return digest_of(count, (*totals, sums.min, sums.max, *counts), mix((sums.hash + mix(nbytes)) & MASK))


def digest_of(count: int, figures: Sequence[float], name: int) -> Digest:
    """A digest from its figures.

    Args:
        count: elements.
        figures: sum, sum of magnitudes, sum of squares, least and greatest finite value (anything where there
            is none), and how many are NaN, +Inf and -Inf.
        name: the 64-bit hash.
    """
    total, magnitude, square, least, most, nan, pos_inf, neg_inf = figures
    some = nan + pos_inf + neg_inf < count
    return Digest(
        count=count,
        sum=total,
        abs_sum=magnitude,
        sq_sum=square,
        min=least if some else None,
        max=most if some else None,
        nan=int(nan),
        pos_inf=int(pos_inf),
        neg_inf=int(neg_inf),
        hash=f"{name:016x}",
    )


def json_safe(value: float) -> float:
    """An overflowed sum as the largest double: JSON has no infinity. Only float64 data can get there."""
    return math.copysign(1.7976931348623157e308, value) if math.isinf(value) else value


def scaled(digest: Digest, factor: int) -> Digest:
    """Digest of a tensor that shows each element of a digested one `factor` times (stride 0)."""
    return Digest(
        count=digest.count * factor,
        sum=digest.sum * factor,
        abs_sum=digest.abs_sum * factor,
        sq_sum=digest.sq_sum * factor,
        min=digest.min,
        max=digest.max,
        nan=digest.nan * factor,
        pos_inf=digest.pos_inf * factor,
        neg_inf=digest.neg_inf * factor,
        hash=digest.hash,
    )


#: Of a tensor without elements.
EMPTY = finish(Sums(), count=0, nbytes=0)
