"""The digest walk on a GPU: a launch for each tensor, and now and then one that adds up their parts.

A tensor is cut into chunks of whole hash blocks; a program walks one chunk. The fast walk sums in
float32 within a block and in float64 across blocks. Where that cannot be right (something is not
finite, a square overflows or vanishes) the program walks its chunk again in float64, with masks.
Addresses are 64-bit throughout: logits of a large vocabulary have more than 2^31 elements.

Needs Triton. The hash is that of `digest`, bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Codes of element types in the kernel, in the order of digest.KINDS.
_F32, _F64, _F16, _BF16, _I16, _U16, _I32, _U32, _I64, _U64, _BYTE = range(11)

F32 = tl.constexpr(_F32)
F64 = tl.constexpr(_F64)
F16 = tl.constexpr(_F16)
BF16 = tl.constexpr(_BF16)
I16 = tl.constexpr(_I16)
U16 = tl.constexpr(_U16)
I32 = tl.constexpr(_I32)
U32 = tl.constexpr(_U32)
I64 = tl.constexpr(_I64)
U64 = tl.constexpr(_U64)
BYTE = tl.constexpr(_BYTE)

BLOCK_WORDS = tl.constexpr(8192)
COLUMNS = tl.constexpr(8)  # numbers per chunk: sum, abs_sum, sq_sum, min, max, nan, pos_inf, neg_inf


@triton.jit
def _mix(z):
    z = z + tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    z = (z ^ (z >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return z ^ (z >> 31)


@triton.jit
def _element(x, part: tl.constexpr, values, KIND: tl.constexpr):
    """Element number `part` of each 8-byte word, as float32, or float64 for types that need it."""
    if KIND == F32:
        v = (x >> (32 * part)).to(tl.uint32).to(tl.float32, bitcast=True)
    elif KIND == F64:
        v = x.to(tl.float64, bitcast=True)
    elif KIND == BF16:
        v = (((x >> (16 * part)).to(tl.uint32) & 0xFFFF) << 16).to(tl.float32, bitcast=True)
    elif KIND == F16:
        v = (
            ((x >> (16 * part)).to(tl.uint32) & 0xFFFF)
            .to(tl.uint16)
            .to(tl.float16, bitcast=True)
            .to(tl.float32)
        )
    elif KIND == I16:
        v = (
            ((x >> (16 * part)).to(tl.uint32) & 0xFFFF)
            .to(tl.uint16)
            .to(tl.int16, bitcast=True)
            .to(tl.float32)
        )
    elif KIND == U16:
        v = ((x >> (16 * part)).to(tl.uint32) & 0xFFFF).to(tl.float32)
    elif KIND == I32:
        v = (x >> (32 * part)).to(tl.uint32).to(tl.int32, bitcast=True).to(tl.float64)
    elif KIND == U32:
        v = (x >> (32 * part)).to(tl.uint32).to(tl.float64)
    elif KIND == I64:
        v = x.to(tl.int64, bitcast=True).to(tl.float64)
    elif KIND == U64:
        v = x.to(tl.float64)
    else:
        v = tl.load(values + ((x >> (8 * part)) & 0xFF).to(tl.int32))
    return v


# Integers are not specialised: a value that is 1 or a multiple of 16 would compile the kernel anew, seconds
# in the middle of the step. Addresses are integers, both ends given so that each is one of 64 bits.
@triton.jit(do_not_specialize=["start", "end", "blocks", "row"])
def digest_chunks(
    values,  # float32 [256]: for eight-bit types
    stats,  # float64 [chunks, COLUMNS]
    hashes,  # int64 [chunks]
    start,  # address of the first byte, a multiple of 8
    end,  # address after the last byte
    blocks,  # hash blocks that a chunk has
    row,  # of `stats` and `hashes` for the first chunk; the others follow
    KIND: tl.constexpr,
    PER_WORD: tl.constexpr,  # elements in 8 bytes
    WORDS: tl.constexpr,  # words per tile
    UNROLL: tl.constexpr,  # tiles under way at once
):
    chunk = tl.program_id(0)
    first = chunk.to(tl.int64) * blocks
    base = start + first * (BLOCK_WORDS * 8)
    nbytes = tl.minimum(end - base, (BLOCK_WORDS * 8) * blocks)
    chunk += row
    words = base.to(tl.pointer_type(tl.uint64))
    whole = nbytes // 8
    count = nbytes * PER_WORD // 8
    lanes = tl.arange(0, WORDS)
    step = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)

    # The last word, padded with zeros.
    byte = tl.arange(0, 8)
    tail_bytes = tl.load(
        base.to(tl.pointer_type(tl.uint8)) + whole * 8 + byte, mask=byte < nbytes % 8, other=0
    )
    tail = tl.sum(tail_bytes.to(tl.uint64) << (8 * byte).to(tl.uint64), axis=0)

    inf = float("inf")
    total = tl.zeros((WORDS,), tl.uint64)
    s = tl.zeros((WORDS,), tl.float64)
    a = tl.zeros((WORDS,), tl.float64)
    q = tl.zeros((WORDS,), tl.float64)
    if PER_WORD == 1 or KIND == I32 or KIND == U32:
        lo = tl.full((WORDS,), inf, tl.float64)
        hi = tl.full((WORDS,), -inf, tl.float64)
    else:
        lo = tl.full((WORDS,), inf, tl.float32)
        hi = tl.full((WORDS,), -inf, tl.float32)

    full_blocks = whole // BLOCK_WORDS
    for b in range(0, full_blocks):
        acc = tl.zeros((WORDS,), tl.uint64)
        bs = tl.zeros_like(lo)
        ba = tl.zeros_like(lo)
        bq = tl.zeros_like(lo)
        for t in range(0, BLOCK_WORDS // (WORDS * UNROLL)):
            # Unrolled, so that several loads are under way at once without an accumulator for each.
            for u in tl.static_range(UNROLL):
                inside = (t * UNROLL + u) * WORDS + lanes
                x = tl.load(words + b * BLOCK_WORDS + inside)
                z = (inside + 1).to(tl.uint64) * step
                acc += (x ^ (x >> 29)) * ((z ^ (z >> 31)) | 1)
                for part in tl.static_range(PER_WORD):
                    v = _element(x, part, values, KIND)
                    bs += v
                    ba += tl.abs(v)
                    bq += v * v
                    lo = tl.minimum(lo, v)
                    hi = tl.maximum(hi, v)
        total += acc * (_mix((first + b).to(tl.uint64)) | 1)
        s += bs.to(tl.float64)
        a += ba.to(tl.float64)
        q += bq.to(tl.float64)

    if nbytes > full_blocks * BLOCK_WORDS * 8:
        acc = tl.zeros((WORDS,), tl.uint64)
        bs = tl.zeros_like(lo)
        ba = tl.zeros_like(lo)
        bq = tl.zeros_like(lo)
        for t in range(0, tl.cdiv(nbytes - full_blocks * BLOCK_WORDS * 8, WORDS * 8)):
            inside = t * WORDS + lanes
            k = full_blocks * BLOCK_WORDS + inside
            x = tl.load(words + k, mask=k < whole, other=0)
            x = tl.where(k == whole, tail, x)
            z = (inside + 1).to(tl.uint64) * step
            acc += (x ^ (x >> 29)) * ((z ^ (z >> 31)) | 1)
            for part in tl.static_range(PER_WORD):
                v = _element(x, part, values, KIND)
                there = k * PER_WORD + part < count
                bs += v
                ba += tl.abs(v)
                bq += v * v
                lo = tl.where(there, tl.minimum(lo, v), lo)
                hi = tl.where(there, tl.maximum(hi, v), hi)
        total += acc * (_mix((first + full_blocks).to(tl.uint64)) | 1)
        s += bs.to(tl.float64)
        a += ba.to(tl.float64)
        q += bq.to(tl.float64)

    sum_a = tl.sum(a, axis=0)
    sum_q = tl.sum(q, axis=0)
    least = tl.min(lo.to(tl.float64), axis=0)
    most = tl.max(hi.to(tl.float64), axis=0)
    row = stats + chunk.to(tl.int64) * COLUMNS
    tl.store(row, tl.sum(s, axis=0))
    tl.store(row + 1, sum_a)
    tl.store(row + 2, sum_q)
    tl.store(row + 3, least)
    tl.store(row + 4, most)
    tl.store(row + 5, 0.0)
    tl.store(row + 6, 0.0)
    tl.store(row + 7, 0.0)
    tl.store(hashes + chunk, tl.sum(total, axis=0).to(tl.int64, bitcast=True))

    # 1e-15: below it the squares come near the smallest float32.
    vanishing = (sum_a > 0) & (tl.maximum(tl.abs(least), tl.abs(most)) < 1e-15)
    if not ((sum_a < inf) & (sum_q < inf)) or vanishing:
        s = tl.zeros((WORDS,), tl.float64)
        a = tl.zeros((WORDS,), tl.float64)
        q = tl.zeros((WORDS,), tl.float64)
        dlo = tl.full((WORDS,), inf, tl.float64)
        dhi = tl.full((WORDS,), -inf, tl.float64)
        nan = tl.zeros((WORDS,), tl.int64)
        pos = tl.zeros((WORDS,), tl.int64)
        neg = tl.zeros((WORDS,), tl.int64)
        for t in range(0, tl.cdiv(nbytes, WORDS * 8)):
            k = t * WORDS + lanes
            x = tl.load(words + k, mask=k < whole, other=0)
            x = tl.where(k == whole, tail, x)
            for part in tl.static_range(PER_WORD):
                v = _element(x, part, values, KIND).to(tl.float64)
                there = k * PER_WORD + part < count
                nan += (there & (v != v)).to(tl.int64)
                pos += (there & (v == inf)).to(tl.int64)
                neg += (there & (v == -inf)).to(tl.int64)
                finite = there & (tl.abs(v) < inf)
                w = tl.where(finite, v, 0.0)
                s += w
                a += tl.abs(w)
                q += w * w
                dlo = tl.where(finite, tl.minimum(dlo, w), dlo)
                dhi = tl.where(finite, tl.maximum(dhi, w), dhi)
        tl.store(row, tl.sum(s, axis=0))
        tl.store(row + 1, tl.sum(a, axis=0))
        tl.store(row + 2, tl.sum(q, axis=0))
        tl.store(row + 3, tl.min(dlo, axis=0))
        tl.store(row + 4, tl.max(dhi, axis=0))
        tl.store(row + 5, tl.sum(nan, axis=0).to(tl.float64))
        tl.store(row + 6, tl.sum(pos, axis=0).to(tl.float64))
        tl.store(row + 7, tl.sum(neg, axis=0).to(tl.float64))


@triton.jit(do_not_specialize=["tensors"])
def add_chunks(
    table,  # int64: row of the first chunk [tensors], number of chunks [tensors]
    stats,  # as above
    hashes,
    result,  # float64 [tensors, COLUMNS]
    result_hashes,  # int64 [tensors]
    tensors,
    MOST: tl.constexpr,  # chunks of one tensor at most
):
    tensor = tl.program_id(0)
    start = tl.load(table + tensor)
    count = tl.load(table + tensors + tensor)
    lanes = tl.arange(0, MOST)
    there = lanes < count
    inf = float("inf")
    source = stats + (start + lanes) * COLUMNS
    target = result + tensor.to(tl.int64) * COLUMNS
    for column in tl.static_range(COLUMNS):
        if column == 3:
            value = tl.min(tl.load(source + column, mask=there, other=inf), axis=0)
        elif column == 4:
            value = tl.max(tl.load(source + column, mask=there, other=-inf), axis=0)
        else:
            value = tl.sum(tl.load(source + column, mask=there, other=0.0), axis=0)
        tl.store(target + column, value)
    total = tl.sum(tl.load(hashes + start + lanes, mask=there, other=0), axis=0)
    tl.store(result_hashes + tensor, total)
