"""Calls of one run alone, or other wiring, through which a difference comes out of equal tensors."""

from __future__ import annotations

import numpy as np

from bridge.verify.births import GAIN, rearranged
from bridge.verify.columns import KINDS, Bools, Columns, Floats, Ints, take
from bridge.verify.divergence import Divergence
from bridge.verify.finding import LIKELY, SURE, Finding
from bridge.verify.floors import EPS, FUSED_ULPS

_MODULE = KINDS.index("module")


def gateways(
    a: Columns, b: Columns, divergence: Divergence, place_b: Floats, partner_b: Ints
) -> list[Finding]:
    """Find those calls; place_b is the execution order of B, partner_b the pair of each of its calls."""
    reads, alignment = divergence.reads, divergence.alignment
    if not len(reads.pair):
        return []
    partner_a = np.full(len(a), -1, np.int64)
    partner_a[alignment.a] = np.arange(len(alignment))
    made_a, made_b = a.reads.producer[reads.a], b.reads.producer[reads.b]
    pair_a = np.where(made_a >= 0, partner_a[made_a], -2)
    pair_b = np.where(made_b >= 0, partner_b[made_b], -2)
    matters = _beyond_rounding(a, b, divergence) & (made_a >= 0) & (made_b >= 0) & (pair_a != pair_b)
    matters &= a.kind[alignment.a[reads.pair]] != _MODULE
    if not matters.any():
        return []
    known_a, known_b = _known_contents(a), _known_contents(b)
    mixed = rearranged(a, b, alignment)
    found: dict[tuple[str, int], Finding] = {}
    for row in np.flatnonzero(matters).tolist():
        pair = int(reads.pair[row])
        reader = b.calls[int(alignment.b[pair])]
        left, right = int(made_a[row]), int(made_b[row])
        first_b = _first_alone(b, right, partner_b, known_a) if pair_b[row] == -1 else -1
        first_a = _first_alone(a, left, partner_a, known_b) if pair_a[row] == -1 else -1
        if first_b < 0 and first_a < 0 and pair_b[row] == -1 and not mixed[pair]:
            size = float(reads.difference[row])
            inside = _entering(b, right, partner_b, divergence)
            made = float(np.nan_to_num(divergence.out_difference[pair], nan=np.inf))
            limit = np.inf if inside is None else GAIN * (float(divergence.noise[pair]) + inside)
            if size > limit and made > limit:
                call = b.calls[right]
                finding = Finding(
                    tier=LIKELY,
                    place=float(place_b[right]),
                    origin="born",
                    basis="digest",
                    reason=(
                        f"what {reader.key} reads of it differs by {size:.2g} of its largest magnitude from "
                        f"what A's reads, while what comes into it differs by at most {inside:.2g}"
                    ),
                    only_b=right,
                )
                found.setdefault(("b", right), finding)
                continue
        if first_b >= 0:
            right, call = first_b, b.calls[first_b]
            finding = Finding(
                tier=SURE,
                place=float(place_b[right]),
                origin="born",
                basis="structure",
                reason=f"B runs {call.op} here, which A does not, and {reader.key} reads what it makes",
                only_b=right,
            )
            found.setdefault(("b", right), finding)
        elif first_a >= 0:
            left, call = first_a, a.calls[first_a]
            finding = Finding(
                tier=SURE,
                place=float(place_b[int(alignment.b[pair])]) - 0.5,
                origin="born",
                basis="structure",
                reason=f"A runs {call.op} here, which B does not, and {reader.key} reads what it makes",
                only_a=left,
            )
            found.setdefault(("a", left), finding)
        elif pair_a[row] >= 0 and pair_b[row] >= 0:
            if divergence.out_equal[pair_a[row]] and divergence.out_equal[pair_b[row]]:
                over = b.calls[right].mutated and not a.calls[int(alignment.a[pair_b[row]])].mutated
                if over:
                    reason = (
                        f"{b.calls[right].key} writes over its own input in B, which {reader.key} reads "
                        f"afterwards; A reads the output of {a.calls[left].key} there"
                    )
                    at = int(pair_b[row])
                    finding = Finding(
                        tier=SURE,
                        place=float(place_b[right]),
                        origin="born",
                        basis="structure",
                        reason=reason,
                        pair=at,
                    )
                    found.setdefault(("pair", at), finding)
                    continue
                reason = f"A reads the output of {a.calls[left].key}, B that of {b.calls[right].key}"
                finding = Finding(
                    tier=SURE,
                    place=float(place_b[int(alignment.b[pair])]),
                    origin="born",
                    basis="structure",
                    reason=reason,
                    pair=pair,
                )
                found.setdefault(("pair", pair), finding)
    return list(found.values())


def _beyond_rounding(a: Columns, b: Columns, divergence: Divergence) -> Bools:
    """Reads that differ by more than a few ULP of their dtype, or have a coarser dtype in B."""
    reads, pool = divergence.reads, a.pool.items()
    numbers = np.unique(np.concatenate([a.reads.dtype, b.reads.dtype]))
    eps_of = np.zeros(int(numbers.max(initial=0)) + 1)
    eps_of[numbers] = [EPS.get(str(pool[number]), 0.0) for number in numbers.tolist()]
    eps, eps_b = eps_of[a.reads.dtype[reads.a]], eps_of[b.reads.dtype[reads.b]]
    other = eps_b > eps  # B reads fewer digits; more of them is no fault
    with np.errstate(invalid="ignore"):
        return np.asarray(reads.comparable & ~reads.equal & ((reads.difference > FUSED_ULPS * eps) | other))


def _known_contents(columns: Columns) -> set[int]:
    return {*columns.reads.hash.tolist(), *columns.writes.hash.tolist()} - {0}


def _entering(columns: Columns, call: int, partner: Ints, divergence: Divergence) -> float | None:
    """How far that differs from which a call without partner, with such calls before it, made its output.

    None: of one of them nothing is known.
    """
    worst, todo, seen = 0.0, [call], {call}
    while todo:
        at = todo.pop()
        for row in take(columns.reads, at):
            made = int(columns.reads.producer[row])
            if bool(columns.reads.void[row]):
                continue
            if made < 0:
                continue  # from outside the step; what differs there is found as such
            if partner[made] >= 0:
                size = float(divergence.out_difference[partner[made]])
                if np.isnan(size):
                    return None
                worst = max(worst, size)
            elif made not in seen:
                seen.add(made)
                todo.append(made)
    return worst


def _first_alone(columns: Columns, call: int, partner: Ints, known: set[int]) -> int:
    """The earliest call without partner that `call` descends from; -1 unless all that they read is known.

    Known are contents that the other run has as well, bit for bit: then the difference was made in between.
    """
    first, todo, seen = call, [call], {call}
    while todo:
        at = todo.pop()
        for row in take(columns.reads, at):
            made = int(columns.reads.producer[row])
            if bool(columns.reads.void[row]) or int(columns.reads.hash[row]) in known:
                continue
            if made < 0 or partner[made] >= 0:
                return -1
            if made not in seen:
                seen.add(made)
                todo.append(made)
                first = min(first, made)
    return first
