"""How much paired calls differ, from digests alone.

A digest bounds a difference from below: |max a - max b|, |rms a - rms b| and |mean a - mean b| are at most
max|a - b|. Sums also tell noise from bias: unbiased rounding of n elements moves a sum by about sqrt(n)
times its size, a bias by n times. Rounding may be as large as the noise floor, but it is not biased.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bridge.verify.align import Alignment
from bridge.verify.columns import (
    GRAD_INPUT,
    GRAD_OUTPUT,
    INPUT,
    KINDS,
    OUTPUT,
    PARAM,
    PHASES,
    Bools,
    Columns,
    Floats,
    Ints,
    Tensors,
    take,
)
from bridge.verify.diff_document import MATCH_KINDS
from bridge.verify.floors import EPS, noise_floors

#: Relative precision of a digest's sums, which may be accumulated in FP32 blocks. It is why a mere
#: permutation of values can not be told from rounding here; where tensors are stored, every element is.
SUM_PRECISION = 1e-7
#: Relative difference of sum|x| below which two tensors are taken for counterparts.
NEAR = 1e-3
#: Standard errors by which a mean must be shifted to count as biased.
STANDARD_ERRORS = 8.0


@dataclass(frozen=True, slots=True)
class TensorPairs:
    """One row per compared pair of tensors; `a` and `b` are rows of the two runs' `Tensors`."""

    pair: Ints
    a: Ints
    b: Ints
    role: Ints
    equal: Bools  #: hashes equal
    comparable: Bools
    difference: Floats  #: relative to the largest magnitude; 0 where equal, NaN where unknown
    biased: Bools  #: a mean shift that unbiased rounding cannot have


@dataclass(frozen=True, slots=True)
class Divergence:
    """Per pair of the alignment: differences of what it read and of what it wrote, and the noise floor."""

    alignment: Alignment
    reads: TensorPairs
    writes: TensorPairs
    in_difference: Floats  #: NaN: nothing comparable
    out_difference: Floats
    in_equal: Bools  #: everything read is bit-equal
    out_equal: Bools
    biased: Bools  #: an output is shifted as unbiased rounding cannot be
    noise: Floats
    backward: Floats  #: module calls: difference of the gradients made; NaN elsewhere
    backward_in: Floats  #: module calls: difference of the upstream gradients; NaN elsewhere
    precision: float = 0.0  #: of the digests; smaller differences say nothing

    def born(self) -> Bools:
        """Pairs that make more difference than rounding explains out of bit-equal inputs."""
        with np.errstate(invalid="ignore"):
            forward = self.in_equal & ((self.out_difference > self.noise) | self.biased)
            backward = (self.backward_in == 0) & self.in_equal & (self.backward > self.noise)
        return np.asarray(forward | backward)


def diverge(
    a: Columns, b: Columns, alignment: Alignment, *, precision: float = 0.0, hashes: bool = True
) -> Divergence:
    """Compare every pair.

    Args:
        precision: Relative precision of the digests (logs print 7 digits).
        hashes: False: floating tensors without a hash are never equal, since the other side's differ.
    """
    fused = np.array(
        [
            len(alignment.runs[pair][0]) + len(alignment.runs[pair][1]) > 2
            if pair in alignment.runs
            else False
            for pair in range(len(alignment))
        ],
        bool,
    )
    floor, bias = noise_floors(a, alignment.a, b, alignment.b, fused)
    floor, bias = floor + precision, bias + precision
    reads = _compare(
        a, b, a.reads, b.reads, *_read_pairs(a, b, alignment), np.zeros(len(alignment)), precision, hashes
    )
    writes = _compare(
        a, b, a.writes, b.writes, *_matched_rows(a.writes, b.writes, alignment, a), bias, precision, hashes
    )
    size = len(alignment)
    forward_reads = np.isin(reads.role, (INPUT, PARAM))
    forward_writes = writes.role == OUTPUT
    in_difference = _worst(reads, size, reads.difference, forward_reads)
    module = a.kind[alignment.a] == KINDS.index("module")
    backward = _worst(writes, size, writes.difference, writes.role == GRAD_INPUT)
    backward_in = _worst(reads, size, reads.difference, reads.role == GRAD_OUTPUT)
    return Divergence(
        alignment=alignment,
        reads=reads,
        writes=writes,
        in_difference=in_difference,
        out_difference=_worst(writes, size, writes.difference, forward_writes),
        in_equal=_all_equal(reads, size, forward_reads) & _nothing_unpaired(a, b, alignment, reads),
        out_equal=_all_equal(writes, size, np.ones(len(writes.pair), bool)),
        biased=_any(writes, size, writes.biased & forward_writes),
        noise=floor,
        backward=np.where(module, backward, np.nan),
        backward_in=np.where(module, backward_in, np.nan),
        precision=precision,
    )


def _nothing_unpaired(a: Columns, b: Columns, alignment: Alignment, reads: TensorPairs) -> Bools:
    """Pairs of which no input lacks a counterpart; those that stand for runs go by what was found."""
    paired = np.bincount(reads.pair, minlength=len(alignment))
    counts_a, counts_b = np.diff(a.reads.start)[alignment.a], np.diff(b.reads.start)[alignment.b]
    whole = (paired >= counts_a) & (paired >= counts_b)
    for pair, (_, run_b) in alignment.runs.items():
        whole[pair] = paired[pair] >= len(_external(b, run_b))
    return np.asarray(whole)


def _matched_rows(left: Tensors, right: Tensors, alignment: Alignment, a: Columns) -> tuple[Ints, Ints, Ints]:
    """(pair, row of A, row of B) of tensors that correspond: by position where counts and roles agree."""
    count_a, count_b = np.diff(left.start)[alignment.a], np.diff(right.start)[alignment.b]
    same = count_a == count_b
    counts = np.where(same, count_a, 0)
    pair = np.repeat(np.arange(len(alignment)), counts)
    within = np.arange(len(pair)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows_a = left.start[alignment.a[pair]] + within
    rows_b = right.start[alignment.b[pair]] + within
    fits = left.role[rows_a] == right.role[rows_b]
    extra: list[tuple[int, int, int]] = []
    broken = np.unique(pair[~fits])
    keep = ~np.isin(pair, broken)
    for number in np.concatenate([np.flatnonzero(~same), broken]).tolist():
        rows = _greedy(
            left,
            right,
            list(take(left, int(alignment.a[number]))),
            list(take(right, int(alignment.b[number]))),
        )
        extra.extend((number, row_a, row_b) for row_a, row_b in rows)
    more = np.array(extra, np.int64).reshape(-1, 3)
    return (
        np.concatenate([pair[keep], more[:, 0]]),
        np.concatenate([rows_a[keep], more[:, 1]]),
        np.concatenate([rows_b[keep], more[:, 2]]),
    )


def _greedy(
    left: Tensors,
    right: Tensors,
    rows_a: list[int],
    rows_b: list[int],
    tests: tuple[str, ...] = ("hash", "near", "shape"),
) -> list[tuple[int, int]]:
    """Pair rows of one role: equal contents first, then nearly equal sums, then equal shapes in order."""
    found: list[tuple[int, int]] = []
    for test in tests:
        for row_a in list(rows_a):
            for row_b in rows_b:
                if left.role[row_a] != right.role[row_b]:
                    continue
                if test == "hash":
                    fits = left.hash[row_a] == right.hash[row_b] != 0
                elif left.shape[row_a] != right.shape[row_b] and left.count[row_a] and right.count[row_b]:
                    fits = False  # logs do not know the shapes of inputs
                elif test == "near":
                    gap = abs(left.abs_sum[row_a] - right.abs_sum[row_b])
                    fits = bool(gap <= NEAR * left.abs_sum[row_a])
                else:
                    fits = True
                if fits:
                    found.append((row_a, row_b))
                    rows_a.remove(row_a)
                    rows_b.remove(row_b)
                    break
    return found


def _read_pairs(a: Columns, b: Columns, alignment: Alignment) -> tuple[Ints, Ints, Ints]:
    """As `_matched_rows` for inputs; a pair that stands for runs of calls has the inputs of the whole run."""
    pair, rows_a, rows_b = _matched_rows(a.reads, b.reads, alignment, a)
    if not alignment.runs:
        return pair, rows_a, rows_b
    keep = ~np.isin(pair, list(alignment.runs))
    extra: list[tuple[int, int, int]] = []
    for number, (run_a, run_b) in alignment.runs.items():
        # A fused kernel and the ops it replaces need not read the same tensors: shape alone says little.
        rows = _greedy(a.reads, b.reads, _external(a, run_a), _external(b, run_b), ("hash", "near"))
        extra.extend((number, row_a, row_b) for row_a, row_b in rows)
    more = np.array(extra, np.int64).reshape(-1, 3)
    return (
        np.concatenate([pair[keep], more[:, 0]]),
        np.concatenate([rows_a[keep], more[:, 1]]),
        np.concatenate([rows_b[keep], more[:, 2]]),
    )


def _external(columns: Columns, run: list[int]) -> list[int]:
    """Rows of the tensors that a run of calls reads and has not made itself, each once."""
    inside, seen, rows = set(run), set(), []
    for call in run:
        for row in take(columns.reads, call):
            value = int(columns.reads.hash[row])
            if int(columns.reads.producer[row]) in inside or (value and value in seen):
                continue
            seen.add(value or -row - 1)
            rows.append(row)
        seen.update(int(columns.writes.hash[row]) for row in take(columns.writes, call))
    return rows


def _compare(
    a: Columns,
    b: Columns,
    left: Tensors,
    right: Tensors,
    pair: Ints,
    rows_a: Ints,
    rows_b: Ints,
    bias: Floats,
    precision: float,
    hashes: bool = True,
) -> TensorPairs:
    """Differences of paired tensors from their digests; see the module's docstring for the bounds."""
    pool = a.pool.items()
    numbers = np.unique(np.concatenate([left.dtype, right.dtype]))
    eps_of = np.zeros(int(numbers.max(initial=0)) + 1)
    eps_of[numbers] = [EPS.get(str(pool[number]), 0.0) for number in numbers.tolist()]
    hash_a, hash_b = left.hash[rows_a], right.hash[rows_b]
    count = left.count[rows_a]
    # Activation logs know nothing but sum|x| of most tensors, not even their shape.
    norms_only = left.known[rows_a] & right.known[rows_b] & ((count == 0) | (right.count[rows_b] == 0))
    norms_only &= (hash_a == 0) | (hash_b == 0)
    comparable = (
        left.known[rows_a]
        & right.known[rows_b]
        & (((left.shape[rows_a] == right.shape[rows_b]) & (count == right.count[rows_b])) | norms_only)
    )
    alike = left.order[rows_a] == right.order[rows_b]
    equal = (
        comparable & alike & (hash_a == hash_b) & (hash_a != 0) & (left.dtype[rows_a] == right.dtype[rows_b])
    )
    n = np.maximum(count, 1.0)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        high_a, high_b = _magnitude(left, rows_a), _magnitude(right, rows_b)
        scale = np.where(high_a > 0, high_a, np.where(high_b > 0, high_b, 1.0))
        rms_a = np.sqrt(np.maximum(left.sq_sum[rows_a], 0.0) / n)
        rms_b = np.sqrt(np.maximum(right.sq_sum[rows_b], 0.0) / n)
        edges = np.fmax(
            np.abs(left.max[rows_a] - right.max[rows_b]), np.abs(left.min[rows_a] - right.min[rows_b])
        )
        level = np.abs(rms_a - rms_b)
        shift = np.fmax(
            np.abs(left.sum[rows_a] - right.sum[rows_b]), np.abs(left.abs_sum[rows_a] - right.abs_sum[rows_b])
        )
        bound = np.fmax(np.fmax(edges, level), shift / n) / scale
        mean_magnitude = np.fmax(left.abs_sum[rows_a], right.abs_sum[rows_b]) / n
        eps = np.fmax(eps_of[left.dtype[rows_a]], eps_of[right.dtype[rows_b]])
        legal = bias[pair] + precision + SUM_PRECISION
        # One ULP grows with its element, so a bias is relative to the mean magnitude; the standard error of
        # the mean is that of roundings of one ULP (or of what the op may do), which legal kernels make.
        error = np.fmax(eps / 2, legal) * rms_a / np.sqrt(n)
        biased = (shift / n > legal * mean_magnitude) & (shift / n > STANDARD_ERRORS * error)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        norm = np.abs(left.abs_sum[rows_a] - right.abs_sum[rows_b]) / np.fmax(left.abs_sum[rows_a], 1e-300)
    bound = np.where(norms_only, norm, bound)
    unhashed = ((hash_a == 0) | (hash_b == 0)) & (hashes | (eps == 0))
    equal |= comparable & unhashed & (bound <= precision) & (precision > 0)
    broken = (left.nonfinite[rows_a] > 0) != (right.nonfinite[rows_b] > 0)
    bound = np.where(broken & comparable, np.inf, bound)
    # What a call overwrites, and memory that nothing has written yet, is no content.
    void = left.void[rows_a] & right.void[rows_b]
    equal |= void
    smallest = eps / 2 / np.sqrt(n)
    bound = np.where(
        (hash_a == 0) | (hash_b == 0) | ~alike, bound, np.fmax(bound, np.where(smallest > 0, smallest, 1 / n))
    )
    unknown = (~comparable | np.isnan(bound)) & ~void
    return TensorPairs(
        pair=pair,
        a=rows_a,
        b=rows_b,
        role=left.role[rows_a],
        equal=equal,
        comparable=~unknown,
        difference=np.where(equal, 0.0, np.where(unknown, np.nan, bound)),
        biased=biased & comparable & ~equal & ~norms_only & (eps > 0),
    )


def _magnitude(tensors: Tensors, rows: Ints) -> Floats:
    return np.asarray(np.fmax(np.abs(tensors.max[rows]), np.abs(tensors.min[rows])))


def _worst(pairs: TensorPairs, size: int, values: Floats, chosen: Bools) -> Floats:
    """Largest of `values` per pair over the chosen tensors; NaN where none is comparable."""
    worst = np.full(size, -1.0)
    use = chosen & ~np.isnan(values)
    np.maximum.at(worst, pairs.pair[use], values[use])
    return np.where(worst < 0, np.nan, worst)


def _any(pairs: TensorPairs, size: int, chosen: Bools) -> Bools:
    found = np.zeros(size, bool)
    found[pairs.pair[chosen]] = True
    return found


def _all_equal(pairs: TensorPairs, size: int, chosen: Bools) -> Bools:
    """Pairs with at least no unequal tensor among the chosen ones."""
    different = np.zeros(size, bool)
    different[pairs.pair[chosen & ~pairs.equal]] = True
    return ~different


def execution_order(a: Columns, b: Columns, alignment: Alignment) -> Ints:
    """Order of rows: pairs 0..P-1, then calls only in A, then calls only in B, as the step ran.

    A call of one run alone is put behind the pair that came before it in that run.
    """
    rank_b = np.zeros(len(b))
    by_b = np.lexsort((b.index, b.rank, b.step))
    rank_b[by_b] = np.arange(len(b))
    rank_a = np.zeros(len(a))
    by_a = np.lexsort((a.index, a.rank, a.step))
    rank_a[by_a] = np.arange(len(a))
    at = np.full(len(a), -1.0)
    at[alignment.a] = rank_b[alignment.b]
    along = np.maximum.accumulate(at[by_a]) if len(a) else at
    placed = np.zeros(len(a))
    placed[by_a] = along + 0.5
    place = np.concatenate([rank_b[alignment.b], placed[alignment.only_a], rank_b[alignment.only_b]])
    tie = np.concatenate(
        [np.zeros(len(alignment)), rank_a[alignment.only_a], np.zeros(len(alignment.only_b))]
    )
    return np.lexsort((tie, place))


def module_pairs_of_fused(alignment: Alignment) -> list[int]:
    """Pairs aligned at a module's boundary."""
    wanted = (MATCH_KINDS.index("module"), MATCH_KINDS.index("renamed"))
    return np.flatnonzero(np.isin(alignment.match, wanted)).tolist()


def phase_name(columns: Columns, call: int) -> str:
    return PHASES[int(columns.phase[call])]
