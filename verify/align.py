"""Pair the calls of two runs, and say of each pair how it was found.

Calls are grouped by where they are (rank, step, microbatch, phase, module). Within a group the two
sequences of ops are aligned in order, so that one extra op does not shift every later pair, as
counters in keys would. What is left over is paired by its producers, its leaf module or its digests,
then runs of left-over calls are paired at their boundary: a fused op in place of several eager ones.

Symmetric: swapping the two runs swaps the pairs and changes nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bridge.verify.columns import KINDS, Bools, Columns, Floats, Ints, combined_hash, inner_calls
from bridge.verify.diff_document import MATCH_KINDS, MatchKind
from bridge.verify.overrides import override_places

#: Cells of one alignment table; above it only equal digests pair what is left in the group.
MAX_CELLS = 20_000_000

#: Calls at the end of a run without partner among which its boundary is looked for.
MAX_RUN = 16

#: Two outputs whose root mean squares differ by more than this, relatively, are hardly one tensor.
ALIKE = 0.05

_NUMBER = {name: number for number, name in enumerate(MATCH_KINDS)}
_MODULE = KINDS.index("module")


@dataclass(frozen=True, slots=True)
class Alignment:
    """Positions of paired calls, sorted by their place in both runs, and the calls without partner."""

    a: Ints
    b: Ints
    match: Ints  #: number in MATCH_KINDS
    only_a: Ints
    only_b: Ints
    runs: dict[int, tuple[list[int], list[int]]]  #: pair -> the calls of A and of B that it stands for

    def __len__(self) -> int:
        return len(self.a)


class _Pairing:
    """The state that the passes share: partner of each call, or -1."""

    def __init__(self, a: Columns, b: Columns) -> None:
        self.a, self.b = a, b
        self.partner_a = np.full(len(a), -1, np.int64)
        self.partner_b = np.full(len(b), -1, np.int64)
        self.match = np.zeros(len(a), np.int64)
        self.runs: dict[int, tuple[list[int], list[int]]] = {}
        self.in_a, self.in_b = combined_hash(a.reads, len(a)), combined_hash(b.reads, len(b))
        self.out_a, self.out_b = combined_hash(a.writes, len(a)), combined_hash(b.writes, len(b))
        self.labels: list[str] = [str(item) for item in a.pool.items()]

    def pair(self, at_a: Ints, at_b: Ints, kind: Ints | MatchKind) -> None:
        self.partner_a[at_a] = at_b
        self.partner_b[at_b] = at_a
        self.match[at_a] = _NUMBER[kind] if isinstance(kind, str) else kind

    def keyed(self, at_a: Ints, at_b: Ints) -> Ints:
        """Match kind of pairs in one place: "key" where the keys are equal, else "moved"."""
        return np.where(self.a.key[at_a] == self.b.key[at_b], _NUMBER["key"], _NUMBER["moved"])


def align(a: Columns, b: Columns, overrides: dict[str, str] | None = None) -> Alignment:
    """Pair the calls of `a` and `b`, which share one pool.

    Raises UsageError for an override that names a key which is not there.
    """
    pairing = _Pairing(a, b)
    _by_override(pairing, overrides or {})
    group_a, group_b = _groups(a, b)
    _by_place(pairing, group_a, group_b)
    _left_over(pairing)
    _at_boundary(pairing, group_a, group_b)
    at_a = np.flatnonzero(pairing.partner_a >= 0)
    at_a = at_a[np.argsort(at_a + pairing.partner_a[at_a], kind="stable")]
    at_b = pairing.partner_a[at_a]
    number = {int(call): pair for pair, call in enumerate(at_a)}
    return Alignment(
        a=at_a,
        b=at_b,
        match=pairing.match[at_a],
        only_a=np.flatnonzero(pairing.partner_a < 0),
        only_b=np.flatnonzero(pairing.partner_b < 0),
        runs={number[call]: runs for call, runs in pairing.runs.items()},
    )


def _by_override(pairing: _Pairing, overrides: dict[str, str]) -> None:
    for at_a, at_b in override_places(overrides, pairing.a.calls, pairing.b.calls):
        pairing.pair(np.array([at_a]), np.array([at_b]), "override")


def _groups(a: Columns, b: Columns) -> tuple[Ints, Ints]:
    """Number of each call's place; ranks and steps count by their order: two single steps compare."""
    return _numbered(a, b, lambda columns: (columns.phase, columns.module, columns.kind == _MODULE))


def _numbered(
    a: Columns, b: Columns, fields: Callable[[Columns], tuple[Ints | Bools, ...]]
) -> tuple[Ints, Ints]:
    """One number per distinct (rank, step, microbatch, *fields), common to both runs."""
    total = np.zeros(len(a) + len(b), np.int64)
    sides = []
    for columns in (a, b):
        steps = np.unique(columns.step, return_inverse=True)[1].reshape(-1)
        sides.append((columns.rank, steps, columns.microbatch, *fields(columns)))
    for parts in zip(*sides, strict=True):
        part = np.concatenate(parts).astype(np.int64)
        total = total * (int(part.max(initial=0)) + 1) + part
        if total.max(initial=0) > 2**31:
            total = np.unique(total, return_inverse=True)[1].reshape(-1)
    # Numbers without gaps, since tables are made over them.
    total = np.unique(total, return_inverse=True)[1].reshape(-1)
    return total[: len(a)], total[len(a) :]


def _slices(group: Ints, free: Bools) -> dict[int, Ints]:
    """Positions of the free calls of each group, in order."""
    at = np.flatnonzero(free)
    at = at[np.argsort(group[at], kind="stable")]
    bounds = np.flatnonzero(np.diff(group[at])) + 1
    return {int(group[part[0]]): part for part in np.split(at, bounds) if len(part)}


def _by_place(pairing: _Pairing, group_a: Ints, group_b: Ints) -> None:
    _same_places(pairing, group_a, group_b)
    slices_b = _slices(group_b, pairing.partner_b < 0)
    for group, at_a in _slices(group_a, pairing.partner_a < 0).items():
        at_b = slices_b.get(group)
        if at_b is not None:
            _align_group(pairing, at_a, at_b)


def _same_places(pairing: _Pairing, group_a: Ints, group_b: Ints) -> None:
    """Pair, all at once, the groups whose ops and outputs are the same in both runs, in order."""
    a, b = pairing.a, pairing.b
    size = int(max(group_a.max(initial=-1), group_b.max(initial=-1))) + 1
    alike = np.bincount(group_a, minlength=size) == np.bincount(group_b, minlength=size)
    # Overrides have taken calls out of their groups: those go the long way.
    alike[group_a[pairing.partner_a >= 0]] = False
    alike[group_b[pairing.partner_b >= 0]] = False
    order_a, order_b = np.argsort(group_a, kind="stable"), np.argsort(group_b, kind="stable")
    at_a, at_b = order_a[alike[group_a[order_a]]], order_b[alike[group_b[order_b]]]
    group = group_a[at_a]
    same = (a.op[at_a] == b.op[at_b]) & (a.signature[at_a] == b.signature[at_b])
    alike[group[~same]] = False
    left, right = pairing.in_a[at_a], pairing.in_b[at_b]
    # Only a call whose inputs another call of B has may have changed places with it.
    other = (left != right) & (left != 0) & (right != 0)
    reordered = np.bincount(group[other & np.isin(left, right[other])], minlength=size) > 0
    keep = alike[group] & ~reordered[group]
    at_a, at_b = at_a[keep], at_b[keep]
    pairing.pair(at_a, at_b, pairing.keyed(at_a, at_b))


def _align_group(pairing: _Pairing, at_a: Ints, at_b: Ints) -> None:
    a, b = pairing.a, pairing.b
    same = (
        len(at_a) == len(at_b)
        and bool((a.op[at_a] == b.op[at_b]).all())
        and bool((a.signature[at_a] == b.signature[at_b]).all())
    )
    ordered = len(at_a)
    if not same:
        chosen = _in_order(_scores(pairing, at_a, at_b), pairing, at_a, at_b)
        ordered = len(chosen[0])
        more_a, more_b = _crossing(pairing, np.delete(at_a, chosen[0]), np.delete(at_b, chosen[1]))
        at_a, at_b = np.append(at_a[chosen[0]], more_a), np.append(at_b[chosen[1]], more_b)
    at_b = _refined(pairing, at_a, at_b)
    # What no order pairs is paired here only by equal inputs; the rest is left to the later passes.
    equal = (pairing.in_a[at_a] == pairing.in_b[at_b]) & (pairing.in_a[at_a] != 0)
    keep = (np.arange(len(at_a)) < ordered) | equal
    at_a, at_b = at_a[keep], at_b[keep]
    pairing.pair(at_a, at_b, pairing.keyed(at_a, at_b))


def _crossing(pairing: _Pairing, at_a: Ints, at_b: Ints) -> tuple[Ints, Ints]:
    """Calls of one place that changed places with others: of one op and signature, in order."""
    a, b = pairing.a, pairing.b
    waiting: dict[tuple[int, int], list[int]] = {}
    for call in at_b.tolist():
        waiting.setdefault((int(b.op[call]), int(b.signature[call])), []).append(call)
    found = []
    for call in at_a.tolist():
        others = waiting.get((int(a.op[call]), int(a.signature[call])))
        if others:
            found.append((call, others.pop(0)))
    pairs = np.array(found, np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def _scores(pairing: _Pairing, at_a: Ints, at_b: Ints) -> Floats:
    """[len(at_a), len(at_b)]: how well two calls of one place fit; 0: not at all."""
    a, b = pairing.a, pairing.b
    if len(at_a) * len(at_b) > MAX_CELLS:
        return np.zeros((0, 0))
    op = a.op[at_a][:, None] == b.op[at_b][None, :]
    shape = a.shapes[at_a][:, None] == b.shapes[at_b][None, :]
    exact = a.signature[at_a][:, None] == b.signature[at_b][None, :]
    # One output shape made of other input shapes is a part of a decomposed call, not its counterpart.
    inputs = a.input_shapes[at_a][:, None] == b.input_shapes[at_b][None, :]
    # Other shapes are paired only where all shapes differ (another batch size).
    op &= (shape & inputs) if (op & shape & inputs).any() else ~shape
    score: Floats = op * (0.5 + 1.0 * shape + 0.5 * exact)
    score += op * 0.3 * _equal_hashes(pairing.in_a[at_a], pairing.in_b[at_b])
    score += op * 0.4 * _equal_hashes(pairing.out_a[at_a], pairing.out_b[at_b])
    score += op * 0.1 * (a.key[at_a][:, None] == b.key[at_b][None, :])
    # Module calls of one FQN are one place even when the class was swapped for the kernel's.
    module = (a.kind[at_a] == _MODULE)[:, None] & (b.kind[at_b] == _MODULE)[None, :]
    score += ~op * module * (0.5 + 1.0 * shape)
    return score


def _equal_hashes(left: npt.NDArray[np.uint64], right: npt.NDArray[np.uint64]) -> Bools:
    """[len(left), len(right)]: known and equal."""
    return np.asarray((left[:, None] == right[None, :]) & (left != 0)[:, None])


def _in_order(score: Floats, pairing: _Pairing, at_a: Ints, at_b: Ints) -> tuple[Ints, Ints]:
    """Order-preserving pairs of greatest total score; ties go by content, so that sides are alike."""
    if score.size == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    rows, cols = score.shape
    best = np.zeros((rows + 1, cols + 1))
    for row in range(rows):
        reach = np.maximum(best[row, 1:], np.where(score[row] > 0, best[row, :-1] + score[row], 0.0))
        best[row + 1, 1:] = np.maximum.accumulate(reach)
    label_a = [pairing.labels[number] for number in pairing.a.op[at_a].tolist()]
    label_b = [pairing.labels[number] for number in pairing.b.op[at_b].tolist()]
    row, col = rows, cols
    chosen: list[tuple[int, int]] = []
    while row and col:
        here = best[row, col]
        if score[row - 1, col - 1] > 0 and here == best[row - 1, col - 1] + score[row - 1, col - 1]:
            row, col = row - 1, col - 1
            chosen.append((row, col))
        elif here == best[row - 1, col] and (
            here != best[row, col - 1] or label_a[row - 1] >= label_b[col - 1]
        ):
            row -= 1
        else:
            col -= 1
    picked = np.array(chosen[::-1], np.int64).reshape(-1, 2)
    return picked[:, 0], picked[:, 1]


def _refined(pairing: _Pairing, at_a: Ints, at_b: Ints) -> Ints:
    """Among pairs of one op whose inputs differ, prefer partners with equal inputs (reordered calls)."""
    left, right = pairing.in_a[at_a], pairing.in_b[at_b]
    alike = (pairing.a.op[at_a] == pairing.b.op[at_b]) & (
        pairing.a.signature[at_a] == pairing.b.signature[at_b]
    )
    open_pairs = np.flatnonzero(alike & (left != right) & (left != 0) & (right != 0))
    if len(open_pairs) < 2:
        return at_b
    waiting: dict[tuple[int, int, int], list[int]] = {}
    for place in open_pairs.tolist():
        call = at_b[place]
        name = (int(pairing.b.op[call]), int(pairing.b.signature[call]), int(right[place]))
        waiting.setdefault(name, []).append(place)
    wish: dict[int, int] = {}
    for place in open_pairs.tolist():
        call = at_a[place]
        found = waiting.get((int(pairing.a.op[call]), int(pairing.a.signature[call]), int(left[place])))
        if found:
            wish[place] = found.pop(0)
    if not wish:
        return at_b
    new = at_b.copy()
    taken = set(wish.values())
    # Whoever lost its partner takes one that is free now and of the same op; counts fit by construction
    # only per op and signature, so the rest is handed out within those.
    free: dict[tuple[int, int], list[int]] = {}
    for place in open_pairs.tolist():
        if place not in taken:
            call = at_b[place]
            free.setdefault((int(pairing.b.op[call]), int(pairing.b.signature[call])), []).append(place)
    for place in open_pairs.tolist():
        call = at_b[place]
        source = wish.get(place)
        if source is None:
            source = free[(int(pairing.b.op[call]), int(pairing.b.signature[call]))].pop(0)
        new[place] = at_b[source]
    return new


def _left_over(pairing: _Pairing) -> None:
    """Pair what has no partner in its place, by producers, leaf module and digests."""
    a, b = pairing.a, pairing.b
    if (pairing.partner_a >= 0).all() or (pairing.partner_b >= 0).all():
        return
    producer_a, producer_b = _first_producer(a), _first_producer(b)
    leaves = [label.rsplit(".", 1)[-1] for label in pairing.labels]
    leaf = np.unique(leaves, return_inverse=True)[1].reshape(-1)
    for _round in range(2):  # a second round sees the producers that the first one paired
        bucket_a, bucket_b = _numbered(a, b, lambda columns: (columns.phase, columns.op, columns.signature))
        slices_b = _slices(bucket_b, pairing.partner_b < 0)
        for bucket, at_a in _slices(bucket_a, pairing.partner_a < 0).items():
            at_b = slices_b.get(bucket)
            if at_b is None or len(at_a) * len(at_b) > MAX_CELLS:
                continue
            mapped = np.where(producer_a[at_a] >= 0, pairing.partner_a[producer_a[at_a]], -1)
            structure = (mapped[:, None] == producer_b[at_b][None, :]) & (mapped >= 0)[:, None]
            moved = leaf[a.module[at_a]][:, None] == leaf[b.module[at_b]][None, :]
            inside = _equal_hashes(pairing.in_a[at_a], pairing.in_b[at_b])
            outside = _equal_hashes(pairing.out_a[at_a], pairing.out_b[at_b])
            score = 1.0 * structure + 0.6 * moved + 0.8 * inside + 0.5 * outside
            rows, cols = _in_order(score, pairing, at_a, at_b)
            for row, col in zip(rows.tolist(), cols.tolist(), strict=True):
                kind: MatchKind = "statistics"
                if structure[row, col]:
                    kind = "structure"
                elif moved[row, col]:
                    kind = "moved"
                pairing.pair(at_a[[row]], at_b[[col]], kind)


def _first_producer(columns: Columns) -> Ints:
    """Position of the call that made the first produced input; -1: none."""
    first = np.full(len(columns), -1, np.int64)
    made = np.flatnonzero(columns.reads.producer >= 0)[::-1]
    first[columns.reads.call[made]] = columns.reads.producer[made]
    return first


def _at_boundary(pairing: _Pairing, group_a: Ints, group_b: Ints) -> None:
    """Pair the last calls of runs without partner that stand in for each other."""
    a, b = pairing.a, pairing.b
    if (pairing.partner_a >= 0).all() or (pairing.partner_b >= 0).all():
        return
    level_a, level_b = _levels(a), _levels(b)
    runs_b = _open_runs(group_b, pairing.partner_b, b)
    for place, run_a in _open_runs(group_a, pairing.partner_a, a).items():
        run_b = runs_b.get(place)
        if run_b is None:
            continue
        # Alike in size, then nearest to the ends of both runs; a tie goes by shape, which is no side's own.
        fits = [
            (
                not _alike(level_a[call_a], level_b[call_b]),
                back_a + back_b,
                max(back_a, back_b),
                str(a.pool.items()[a.first_shape[call_a]]),
                call_a,
                call_b,
            )
            for back_a, call_a in enumerate(reversed(run_a[-MAX_RUN:]))
            for back_b, call_b in enumerate(reversed(run_b[-MAX_RUN:]))
            if a.first_shape[call_a] == b.first_shape[call_b] >= 0
        ]
        if fits:
            *_, last_a, last_b = min(fits)
            kind: MatchKind = "renamed" if len(run_a) == len(run_b) == 1 else "module"
            pairing.pair(np.array([last_a]), np.array([last_b]), kind)
            pairing.runs[last_a] = (run_a, run_b)


def _levels(columns: Columns) -> Floats:
    """Root mean square of each call's first output; NaN: not known."""
    writes = columns.writes
    levels = np.full(len(columns), np.nan)
    first = writes.start[:-1][np.diff(writes.start) > 0]
    with np.errstate(invalid="ignore", divide="ignore"):
        levels[writes.call[first]] = np.sqrt(writes.sq_sum[first] / np.maximum(writes.count[first], 1.0))
    return levels


def _alike(left: float, right: float) -> bool:
    """Two outputs that may be one tensor by their size; unknown sizes may."""
    return not abs(left - right) > ALIKE * max(left, right)


def _open_runs(group: Ints, partner: Ints, columns: Columns) -> dict[tuple[int, int], list[int]]:
    """Unpaired ops by (group, number of paired ops before them in the group)."""
    order = np.argsort(group, kind="stable")
    order = order[columns.kind[order] != _MODULE]
    paired = partner[order] >= 0
    before = np.cumsum(paired) - paired
    starts = np.concatenate([[True], np.diff(group[order]) != 0]) if len(order) else np.zeros(0, bool)
    base = np.maximum.accumulate(np.where(starts, before, 0)) if len(order) else before
    outer = inner_calls(columns)
    runs: dict[tuple[int, int], list[int]] = {}
    for place in np.flatnonzero(~paired).tolist():
        call = int(order[place])
        run = runs.setdefault((int(group[call]), int(before[place] - base[place])), [])
        # A kernel's launch, or a wrapper's local op, is part of the call that it runs inside.
        if outer[call] < 0 and not any(columns.index[other] == columns.parent[call] for other in run):
            run.append(call)
    return runs
