"""The digest walk in numpy, for machines without a C compiler; same hash bit for bit."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from bridge.capture.digest import BLOCK_BYTES, BLOCK_WORDS, MASK, STEP, Sums, mix

Bytes = npt.NDArray[np.uint8]


def walk(data: Bytes, dtype: str, table: npt.NDArray[np.float64] | None) -> Sums:
    """Sums over the elements in `data`, shape [nbytes]; `table` gives the values of eight-bit types."""
    sums = Sums()
    for block, start in enumerate(range(0, len(data), BLOCK_BYTES)):
        part = data[start : start + BLOCK_BYTES]
        sums.hash = (sums.hash + (mix(block) | 1) * _hash_block(part)) & MASK
        _add(sums, _values(part, dtype, table))
    return sums


@cache
def weights() -> npt.NDArray[np.uint64]:
    """Weight of each word of a block, shape [BLOCK_WORDS]."""
    z = np.arange(1, BLOCK_WORDS + 1, dtype=np.uint64) * np.uint64(STEP)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


def mix_all(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`digest.mix` of many numbers at once."""
    z = z + np.uint64(STEP)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _hash_block(part: Bytes) -> int:
    if len(part) % 8:
        part = np.concatenate((part, np.zeros(-len(part) % 8, dtype=np.uint8)))
    words = part.view(np.uint64)
    mixed = words ^ (words >> np.uint64(29))
    return int(np.dot(mixed, weights()[: len(mixed)]))


def _values(part: Bytes, dtype: str, table: npt.NDArray[np.float64] | None) -> npt.NDArray[np.float64]:
    if table is not None:
        values: npt.NDArray[np.float64] = table[part]
        return values
    if dtype == "bfloat16":
        return (part.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return part.view(np.dtype(dtype)).astype(np.float64)


def _add(sums: Sums, values: npt.NDArray[np.float64]) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        _add_quietly(sums, values)


def _add_quietly(sums: Sums, values: npt.NDArray[np.float64]) -> None:
    finite = values
    magnitude = float(np.abs(values).sum())
    if not np.isfinite(magnitude):
        sums.nan += int(np.isnan(values).sum())
        sums.pos_inf += int((values == np.inf).sum())
        sums.neg_inf += int((values == -np.inf).sum())
        finite = values[np.isfinite(values)]
        magnitude = float(np.abs(finite).sum())
    if not len(finite):
        return
    sums.finite += len(finite)
    sums.sum += float(finite.sum())
    sums.abs_sum += magnitude
    sums.sq_sum += float(np.dot(finite, finite))
    sums.min = min(sums.min, float(finite.min()))
    sums.max = max(sums.max, float(finite.max()))
