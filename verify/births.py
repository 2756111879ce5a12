"""Pairs that make a difference of their own: of equal inputs, by other arguments, or far beyond inputs."""

from __future__ import annotations

import re

import numpy as np

from bridge.capture.record import Call
from bridge.verify.align import Alignment
from bridge.verify.columns import KINDS, PARAM, PHASES, Bools, Columns, Floats, short_op
from bridge.verify.diff_document import Origin
from bridge.verify.divergence import Divergence
from bridge.verify.finding import LIKELY, SURE, TOLD, Arguments, Finding, argument_differences
from bridge.verify.floors import EPS, narrowing

#: A call whose inputs differ is accused from digests only when its outputs differ this many times more than
#: its inputs do or, rounding propagated, may do.
GAIN = 32.0

#: Without a suspect, outputs that differ by more than this, and by GAIN times what the step's coarsest
#: rounding may do, are no rounding that anybody has explained.
UNEXPLAINED = 1e-3

_MODULE = KINDS.index("module")
_RANDOM = re.compile(r"(dropout|bernoulli|rand|normal_|uniform_|exponential_|multinomial|philox)")


def differing_arguments(a: Columns, b: Columns, divergence: Divergence) -> Arguments:
    """Per pair the arguments and flags that differ."""
    alignment = divergence.alignment
    found: Arguments = {}
    for pair in np.flatnonzero(a.told[alignment.a] != b.told[alignment.b]).tolist():
        differences = argument_differences(a.calls[int(alignment.a[pair])], b.calls[int(alignment.b[pair])])
        if differences:
            found[pair] = differences
    return found


def rounding_levels(b: Columns, divergence: Divergence) -> Floats:
    """Per pair: how far its inputs may differ by rounding alone, propagated along producers.

    Digests see a difference only in part, so a call that reads bfloat16 roundings is not accused for
    showing them in float32.
    """
    alignment = divergence.alignment
    # Plain lists: the walk looks at single numbers, where arrays are slow.
    carried = [0.0] * len(b)
    inside = np.zeros(len(alignment))
    pair_of = np.full(len(b), -1, np.int64)
    pair_of[alignment.b] = np.arange(len(alignment))
    differs = np.ones(len(b), bool)
    differs[alignment.b] = ~(divergence.out_equal & divergence.in_equal)
    start, producer = b.reads.start.tolist(), b.reads.producer.tolist()
    order = np.lexsort((b.rank, b.index, b.step))
    own = np.fmax(divergence.noise, np.fmin(np.nan_to_num(divergence.out_difference, posinf=np.inf), 1.0))
    growth, equal, pairs = own.tolist(), divergence.out_equal.tolist(), pair_of.tolist()
    for call in order[differs[order]].tolist():
        reach = 0.0
        for made in producer[start[call] : start[call + 1]]:
            if made >= 0 and carried[made] > reach:
                reach = carried[made]
        pair = pairs[call]
        if pair >= 0:
            inside[pair] = reach
            reach = 0.0 if equal[pair] else max(reach, growth[pair])
        carried[call] = reach
    return inside


def born_findings(
    a: Columns, b: Columns, divergence: Divergence, place_b: Floats, arguments: Arguments, level: Floats
) -> list[Finding]:
    alignment = divergence.alignment
    found = []
    born = divergence.born()
    born &= ~_other_weights(b, divergence)
    for pair in np.flatnonzero(born | _likely(a, b, divergence, level)).tolist():
        at_a, at_b = int(alignment.a[pair]), int(alignment.b[pair])
        call_a, call_b = a.calls[at_a], b.calls[at_b]
        sure = bool(born[pair])
        size, floor = float(divergence.out_difference[pair]), float(divergence.noise[pair])
        part = "outputs"
        gradients = bool(np.nan_to_num(divergence.backward[pair]) > np.nan_to_num(size))
        if (sure and not size > floor and not divergence.biased[pair]) or (not sure and gradients):
            size, part = float(divergence.backward[pair]), "gradients"
        amount = f"{part} differ by {size:.2g} of their largest magnitude, rounding explains {floor:.2g}"
        if sure and divergence.biased[pair] and not size > floor:
            amount = f"{part} are shifted as a whole: less than rounding may be, but not as rounding is"
        origin: Origin = "born"
        if _draws(call_b) and not _read(a, at_a) and not _read(b, at_b):
            continue  # such as a data loader's seed: numbers that no tensor comes of part no run
        if pair in arguments and set(arguments[pair]) == {"dtype"} and not _coarser(call_a, call_b):
            continue  # more digits are no fault
        if pair in arguments:
            reason = f"{_said(arguments[pair])}; {amount}"
        elif sure and _draws(call_b):
            origin = "nondeterministic"
            reason = f"{short_op(call_b.op)} draws random numbers and the runs drew different ones; {amount}"
        elif sure and call_a.op != call_b.op:
            reason = f"{call_b.op} in place of {call_a.op} makes something else of equal inputs: {amount}"
        elif sure:
            reason = f"inputs are bit-equal; {amount}"
        else:
            inputs = float(np.fmax(divergence.in_difference[pair], level[pair]))
            reason = f"{amount}, while inputs differ by at most {inputs:.2g} (digests only: a heuristic)"
        found.append(
            Finding(
                tier=SURE if sure else LIKELY,
                place=float(place_b[at_b]),
                origin=origin,
                basis="structure" if pair in arguments else "digest",
                reason=reason,
                pair=pair,
                backward=part == "gradients",
            )
        )
    return found


def unseen_findings(a: Columns, b: Columns, divergence: Divergence, place_b: Floats) -> list[Finding]:
    """Calls of equal inputs whose outputs no digest shows as a whole, but of which later calls read parts.

    A collective returns before its result is there; an optimizer reads the shards of it one by one.
    """
    alignment, reads = divergence.alignment, divergence.reads
    partner = np.full(len(b), -1, np.int64)
    partner[alignment.b] = np.arange(len(alignment))
    partner_a = np.full(len(a), -1, np.int64)
    partner_a[alignment.a] = np.arange(len(alignment))
    made_a, made_b = a.reads.producer[reads.a], b.reads.producer[reads.b]
    maker = np.where(made_b >= 0, partner[made_b], -1)
    maker[maker != np.where(made_a >= 0, partner_a[made_a], -2)] = -1
    shown = np.zeros(len(alignment), bool)
    shown[divergence.writes.pair[divergence.writes.comparable & ~_both_void(a, b, divergence)]] = True
    with np.errstate(invalid="ignore"):
        differs = reads.comparable & ~reads.equal & (reads.difference > divergence.noise[maker])
    rows = np.flatnonzero(differs & (maker >= 0))
    rows = rows[divergence.in_equal[maker[rows]] & ~shown[maker[rows]]]
    worst: dict[int, int] = {}
    for row in rows.tolist():
        pair = int(maker[row])
        if pair not in worst or reads.difference[row] > reads.difference[worst[pair]]:
            worst[pair] = row
    return [
        Finding(
            tier=SURE,
            place=float(place_b[int(alignment.b[pair])]),
            origin="born",
            basis="digest",
            reason=(
                f"inputs are bit-equal; what {b.calls[int(alignment.b[reads.pair[row]])].key} reads of its "
                f"output differs by {reads.difference[row]:.2g} of its largest magnitude, rounding explains "
                f"{divergence.noise[pair]:.2g}"
            ),
            pair=pair,
        )
        for pair, row in worst.items()
    ]


def _both_void(a: Columns, b: Columns, divergence: Divergence) -> Bools:
    writes = divergence.writes
    return np.asarray(a.writes.void[writes.a] & b.writes.void[writes.b])


def told_findings(
    a: Columns,
    b: Columns,
    divergence: Divergence,
    place_b: Floats,
    arguments: Arguments,
) -> list[Finding]:
    """Calls that were given other arguments, or another dtype, and made something else of it."""
    alignment = divergence.alignment
    born = divergence.born()
    found = []
    for pair, differences in arguments.items():
        at_b = int(alignment.b[pair])
        if born[pair] or divergence.out_equal[pair] or b.calls[at_b].kind == "module":
            continue
        found.append(
            Finding(
                tier=SURE if divergence.in_equal[pair] else TOLD,
                place=float(place_b[at_b]),
                origin="born",
                basis="structure",
                reason=_said(differences),
                pair=pair,
            )
        )
    same_shapes = a.shapes[alignment.a] == b.shapes[alignment.b]
    other_dtype = same_shapes & (a.signature[alignment.a] != b.signature[alignment.b]) & divergence.in_equal
    for pair in np.flatnonzero(other_dtype).tolist():
        left, right = a.calls[int(alignment.a[pair])], b.calls[int(alignment.b[pair])]
        if born[pair] or pair in arguments or not _coarser(left, right):
            continue
        dtypes = (
            ", ".join(record.dtype for record in left.outputs),
            ", ".join(record.dtype for record in right.outputs),
        )
        found.append(
            Finding(
                tier=SURE,
                place=float(place_b[int(alignment.b[pair])]),
                origin="born",
                basis="structure",
                reason=f"of equal inputs A makes {dtypes[0]} and B makes {dtypes[1]}",
                pair=pair,
            )
        )
    return found


def _other_weights(b: Columns, divergence: Divergence) -> Bools:
    """Module calls around modules whose parameters differ: they read more than what they were called with."""
    reads, alignment = divergence.reads, divergence.alignment
    other = reads.pair[(reads.role == PARAM) & reads.comparable & ~reads.equal]
    names = {b.text(number) for number in np.unique(b.module[alignment.b[other]]).tolist()}
    outer = {""} if names else set()
    for name in names:
        parts = name.split(".")
        outer.update(".".join(parts[:length]) for length in range(1, len(parts)))
    numbers = [b.pool.number(name) for name in outer]
    modules = b.kind[alignment.b] == _MODULE
    return np.asarray(modules & np.isin(b.module[alignment.b], numbers))


def rearranged(a: Columns, b: Columns, alignment: Alignment) -> Bools:
    """Pairs of ops of a module in which either run has calls of its own: they may make other things."""
    alone = np.concatenate([a.module[alignment.only_a], b.module[alignment.only_b]])
    return np.asarray((b.kind[alignment.b] != _MODULE) & np.isin(b.module[alignment.b], alone))


def unexplained(a: Columns, b: Columns, divergence: Divergence) -> Bools:
    """Pairs of forward and backward whose outputs, or gradients, are further apart than rounding gets."""
    phase = b.phase[divergence.alignment.b]
    inside = (phase != PHASES.index("optimizer")) & (phase != PHASES.index("other"))
    inside &= ~rearranged(a, b, divergence.alignment)
    coarsest = float(divergence.noise[inside & ~divergence.out_equal].max(initial=0.0))
    with np.errstate(invalid="ignore"):
        size = np.fmax(divergence.out_difference, divergence.backward)
        return np.asarray(inside & ~divergence.out_equal & (size > max(UNEXPLAINED, GAIN * coarsest)))


def _likely(a: Columns, b: Columns, divergence: Divergence, level: Floats) -> Bools:
    """Pairs whose outputs (or, of a module, gradients) differ far more than their unequal inputs can."""
    with np.errstate(invalid="ignore"):
        inputs = divergence.noise + np.fmax(divergence.in_difference, level)
        # Inputs a hair apart may round to neighbours when they are stored in fewer digits.
        inputs += narrowing(b)[divergence.alignment.b]
        forward = divergence.out_difference > GAIN * inputs
        backward = divergence.backward > GAIN * np.fmax(inputs, divergence.backward_in)
        # Normalising optimizers turn rounding of a tiny gradient into a whole step; only replay can tell.
        steps = b.phase[divergence.alignment.b] == PHASES.index("optimizer")
        shown = shown_later(a, b, divergence) > GAIN * inputs
        return np.asarray(
            ~divergence.in_equal & (forward | backward) & ~steps & _whole(b, divergence) & shown
        )


def shown_later(a: Columns, b: Columns, divergence: Divergence) -> Floats:
    """Per pair in rearranged code the largest difference that anything later shows; elsewhere infinite.

    Where ops were rearranged, two calls that seem to correspond may make different intermediates of one
    right result. What is wrong there comes out, and calls that surely correspond read it.
    """
    alignment = divergence.alignment
    mixed = rearranged(a, b, alignment)
    mixed[list(alignment.runs)] = True
    size = np.fmax(divergence.in_difference, np.fmax(divergence.out_difference, divergence.backward))
    # An optimizer makes whole steps of rounding, so what it shows is no sign.
    silent = mixed | (b.phase[alignment.b] == PHASES.index("optimizer"))
    size = np.where(silent, 0.0, np.nan_to_num(size, posinf=np.inf))
    order = np.lexsort((b.rank[alignment.b], b.index[alignment.b], b.step[alignment.b]))
    later = np.empty(len(order))
    later[order] = np.maximum.accumulate(size[order][::-1])[::-1]
    return np.where(mixed, later, np.inf)


def _whole(b: Columns, divergence: Divergence) -> Bools:
    """Pairs of which every input was compared: a call on parts of a tensor is another call.

    Of one that reads something with no counterpart at all, nothing is known about the inputs.
    """
    alignment = divergence.alignment
    whole: Bools = np.diff(b.reads.start)[alignment.b] == 0
    whole[divergence.reads.pair] = True
    whole[divergence.reads.pair[~divergence.reads.comparable]] = False
    return whole


def _coarser(a: Call, b: Call) -> bool:
    """Some output of B has fewer digits than A's."""
    return any(
        EPS.get(right.dtype, 0.0) > EPS.get(left.dtype, 0.0)
        for left, right in zip(a.outputs, b.outputs, strict=False)
    )


def _read(columns: Columns, call: int) -> bool:
    """Whether some call makes a tensor of what this one has made."""
    readers = columns.reads.call[columns.reads.producer == call]
    return bool((np.diff(columns.writes.start)[readers] > 0).any())


def _draws(call: Call) -> bool:
    return bool(_RANDOM.search(short_op(call.op))) or "rng" in call.flags


def _said(differences: dict[str, tuple[str, str]]) -> str:
    return ", ".join(f"{name} is {left} in A and {right} in B" for name, (left, right) in differences.items())
