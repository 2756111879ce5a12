"""Where differences come from, as far as digests, arguments and the graph can tell (no tensors needed).

Each finding is a place where something happens that its inputs do not explain. They come in tiers of
evidence; within a tier, the first in execution order is the first suspect. Attribution by replay, which
needs tensors, is in `counterfactual` and overrules what is found here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

import numpy as np

from bridge.capture.record import Call
from bridge.verify.align import Alignment
from bridge.verify.columns import (
    GRAD_INPUT,
    GRAD_OUTPUT,
    KINDS,
    OUTPUT,
    PHASES,
    Bools,
    Columns,
    Floats,
    Ints,
    reads_of,
    short_op,
    take,
)
from bridge.verify.diff_document import ORIGINS, Basis, Origin
from bridge.verify.divergence import Divergence, execution_order
from bridge.verify.floors import EPS, FUSED_ULPS

#: Tiers of evidence. 0: inputs agree and outputs do not (or the calls are told to do different things);
#: 1: told to do different things, but the inputs differ as well; 2: the difference entered from outside
#: the step; 3: outputs differ far more than inputs (heuristic).
SURE, TOLD, ENTERED, LIKELY = range(4)

#: A call whose inputs differ is accused from digests only when its outputs differ this many times more than
#: its inputs do or, rounding propagated, may do.
GAIN = 32.0

#: Growth of a rounding difference through a whole module that is still no sign of a fault.
AMPLIFICATION = 8.0

#: When more than this share of a step's float inputs differ at entry, they come from earlier steps.
MOSTLY = 0.5

#: Per pair, the scalar arguments and flags that differ: name -> (in A, in B).
Arguments = dict[int, dict[str, tuple[str, str]]]

_RANDOM = re.compile(r"(dropout|bernoulli|rand|normal_|uniform_|exponential_|multinomial|philox)")
_MODULE = KINDS.index("module")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that its inputs do not explain. Exactly one of pair, only_a, only_b is not -1."""

    tier: int
    place: float  #: position in execution order
    origin: Origin
    basis: Basis
    reason: str
    pair: int = -1
    only_a: int = -1
    only_b: int = -1
    detail: str = ""
    backward: bool = False  #: a module call whose gradients are meant, not its outputs
    module: str = ""  #: where the call itself does not say: the module it belongs to


@dataclass(frozen=True, slots=True, kw_only=True)
class Attributions:
    """Findings, most likely culprit first, and the origin of every pair's difference."""

    findings: tuple[Finding, ...]
    origin: Ints  #: number in ORIGINS, per pair
    tainted: Bools  #: per pair: descends from a finding
    entered_share: float  #: of the float tensors that came from outside, those that differ
    entered_worst: float  #: largest relative difference among them
    entered: tuple[str, ...] = ()  #: their names, worst first
    batch_differs: bool = False
    arguments: Arguments = field(default_factory=dict)


def attribute(a: Columns, b: Columns, divergence: Divergence) -> Attributions:
    """Find what the inputs of calls do not explain."""
    alignment = divergence.alignment
    place_b = _places(b)
    arguments = _arguments(a, b, divergence)
    level = _levels(b, divergence)
    partner_b = np.full(len(b), -1, np.int64)
    partner_b[alignment.b] = np.arange(len(alignment))
    findings = [
        *_born(a, b, divergence, place_b, arguments, level),
        *_told(a, b, divergence, place_b, arguments),
        *_gateways(a, b, divergence, place_b, partner_b),
    ]
    entered, share, worst, names, batch = _entered(a, b, divergence, place_b)
    findings = _not_cleared(a, b, divergence, level, findings)
    findings = _without_outer(a, b, divergence, [*findings, *entered])
    findings.sort(key=lambda finding: (finding.tier, finding.place))
    origin, tainted = _origins(b, divergence, findings, place_b, partner_b, level)
    return Attributions(
        findings=tuple(findings),
        origin=origin,
        tainted=tainted,
        entered_share=share,
        entered_worst=worst,
        entered=names,
        batch_differs=batch,
        arguments=arguments,
    )


def makers_of(columns: Columns, module: int, *, backward: bool) -> list[int]:
    """Positions of the calls that made a module call's gradients (or outputs)."""
    wanted = GRAD_INPUT if backward else OUTPUT
    rows = [row for row in take(columns.writes, module) if columns.writes.role[row] == wanted]
    return [int(columns.writes.producer[row]) for row in rows if columns.writes.producer[row] >= 0]


def retaint(
    a: Columns, b: Columns, divergence: Divergence, found: Attributions, findings: list[Finding], origin: Ints
) -> Attributions:
    """The attributions with other findings, and what descends from them; `origin` wins where it is set."""
    partner_b = np.full(len(b), -1, np.int64)
    partner_b[divergence.alignment.b] = np.arange(len(divergence.alignment))
    level = _levels(b, divergence)
    findings = _without_outer(a, b, divergence, _not_cleared(a, b, divergence, level, findings))
    base, tainted = _origins(b, divergence, findings, _places(b), partner_b, level)
    replayed = origin != found.origin
    return replace(found, findings=tuple(findings), origin=np.where(replayed, origin, base), tainted=tainted)


def _places(columns: Columns) -> Floats:
    """Rank of each call in execution order."""
    places = np.zeros(len(columns))
    places[np.lexsort((columns.rank, columns.index, columns.step))] = np.arange(len(columns))
    return places


def argument_differences(a: Call, b: Call) -> dict[str, tuple[str, str]]:
    """Scalar arguments and precision flags that differ; of different classes only what both have."""
    found: dict[str, tuple[str, str]] = {}
    common = a.op != b.op or a.kind == "module"
    for left, right, mark in ((a.attrs, b.attrs, ""), (a.flags, b.flags, "flag ")):
        if left == right:
            continue
        for name in sorted({*left, *right}, key=str):
            if mark and (name not in left or name not in right or name.startswith(("rng", "grid"))):
                continue
            if common and (name not in left or name not in right):
                continue
            pair = left.get(name, "absent"), right.get(name, "absent")
            if pair[0] != pair[1]:
                found[mark + name] = str(pair[0]), str(pair[1])
    return found


def _arguments(a: Columns, b: Columns, divergence: Divergence) -> Arguments:
    alignment = divergence.alignment
    calls_a, calls_b = a.calls, b.calls
    found: Arguments = {}
    for pair, (at_a, at_b) in enumerate(zip(alignment.a.tolist(), alignment.b.tolist(), strict=True)):
        left, right = calls_a[at_a], calls_b[at_b]
        if left.attrs != right.attrs or left.flags != right.flags:
            differences = argument_differences(left, right)
            if differences:
                found[pair] = differences
    return found


def _draws(call: Call) -> bool:
    return bool(_RANDOM.search(short_op(call.op))) or "rng" in call.flags


def _said(differences: dict[str, tuple[str, str]]) -> str:
    return ", ".join(f"{name} is {left} in A and {right} in B" for name, (left, right) in differences.items())


def _levels(b: Columns, divergence: Divergence) -> Floats:
    """Per pair: how far its inputs may differ by rounding alone, propagated along producers.

    Digests see a difference only in part, so a call that reads bfloat16 roundings is not accused for
    showing them in float32.
    """
    alignment = divergence.alignment
    carried = np.zeros(len(b))
    inside = np.zeros(len(alignment))
    pair_of = np.full(len(b), -1, np.int64)
    pair_of[alignment.b] = np.arange(len(alignment))
    differs = np.ones(len(b), bool)
    differs[alignment.b] = ~(divergence.out_equal & divergence.in_equal)
    start, producer = b.reads.start, b.reads.producer
    order = np.lexsort((b.rank, b.index, b.step))
    noise, out = divergence.noise, divergence.out_difference
    for call in order[differs[order]].tolist():
        made = producer[start[call] : start[call + 1]]
        made = made[made >= 0]
        reach = float(carried[made].max()) if len(made) else 0.0
        pair = int(pair_of[call])
        if pair >= 0:
            inside[pair] = reach
            own = max(noise[pair], 0.0 if np.isnan(out[pair]) else min(out[pair], 1.0))
            reach = 0.0 if divergence.out_equal[pair] else max(reach, own)
        carried[call] = reach
    return inside


def _likely(b: Columns, divergence: Divergence, level: Floats) -> Bools:
    """Pairs whose outputs (or, of a module, gradients) differ far more than their unequal inputs can."""
    with np.errstate(invalid="ignore"):
        inputs = divergence.noise + np.fmax(divergence.in_difference, level)
        forward = divergence.out_difference > GAIN * inputs
        backward = divergence.backward > GAIN * np.fmax(inputs, divergence.backward_in)
        # Normalising optimizers turn rounding of a tiny gradient into a whole step; only replay can tell.
        steps = b.phase[divergence.alignment.b] == PHASES.index("optimizer")
        return np.asarray(~divergence.in_equal & (forward | backward) & ~steps & _whole(divergence))


def _whole(divergence: Divergence) -> Bools:
    """Pairs of which every input was compared: a call on parts of a tensor is another call."""
    whole = np.ones(len(divergence.alignment), bool)
    whole[divergence.reads.pair[~divergence.reads.comparable]] = False
    return whole


def _born(
    a: Columns, b: Columns, divergence: Divergence, place_b: Floats, arguments: Arguments, level: Floats
) -> list[Finding]:
    alignment = divergence.alignment
    found = []
    born = divergence.born()
    for pair in np.flatnonzero(born | _likely(b, divergence, level)).tolist():
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


def _told(
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


def _coarser(a: Call, b: Call) -> bool:
    """Some output of B has fewer digits than A's."""
    return any(
        EPS.get(right.dtype, 0.0) > EPS.get(left.dtype, 0.0)
        for left, right in zip(a.outputs, b.outputs, strict=False)
    )


def _gateways(
    a: Columns, b: Columns, divergence: Divergence, place_b: Floats, partner_b: Ints
) -> list[Finding]:
    """Calls of one run alone, or other wiring, through which a difference comes out of equal tensors."""
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
    known_a, known_b = _known_contents(a), _known_contents(b)
    found: dict[tuple[str, int], Finding] = {}
    for row in np.flatnonzero(matters).tolist():
        pair = int(reads.pair[row])
        reader = b.calls[int(alignment.b[pair])]
        left, right = int(made_a[row]), int(made_b[row])
        first_b = _first_alone(b, right, partner_b, known_a) if pair_b[row] == -1 else -1
        first_a = _first_alone(a, left, partner_a, known_b) if pair_a[row] == -1 else -1
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
    eps = np.array([EPS.get(str(pool[number]), 0.0) for number in a.reads.dtype[reads.a].tolist()])
    eps_b = np.array([EPS.get(str(pool[number]), 0.0) for number in b.reads.dtype[reads.b].tolist()])
    other = eps_b > eps  # B reads fewer digits; more of them is no fault
    with np.errstate(invalid="ignore"):
        return np.asarray(reads.comparable & ~reads.equal & ((reads.difference > FUSED_ULPS * eps) | other))


def _known_contents(columns: Columns) -> set[int]:
    return {*columns.reads.hash.tolist(), *columns.writes.hash.tolist()} - {0}


def _first_alone(columns: Columns, call: int, partner: Ints, known: set[int]) -> int:
    """The earliest call without partner that `call` descends from; -1 unless all that they read is known.

    Known are contents that the other run has as well, bit for bit: then the difference was made in between.
    """
    first, todo, seen = call, [call], {call}
    while todo:
        at = todo.pop()
        for row in take(columns.reads, at):
            made = int(columns.reads.producer[row])
            if int(columns.reads.hash[row]) in known:
                continue
            if made < 0 or partner[made] >= 0:
                return -1
            if made not in seen:
                seen.add(made)
                todo.append(made)
                first = min(first, made)
    return first


def _entered(
    a: Columns, b: Columns, divergence: Divergence, place_b: Floats
) -> tuple[list[Finding], float, float, tuple[str, ...], bool]:
    """Tensors from outside the step that differ: parameters, buffers, the batch."""
    reads, alignment = divergence.reads, divergence.alignment
    outside = (a.reads.producer[reads.a] < 0) & (b.reads.producer[reads.b] < 0) & reads.comparable
    outside &= reads.role != GRAD_OUTPUT
    made: dict[int, float] = {}
    for content, maker in zip(b.writes.hash.tolist(), place_b[b.writes.call].tolist(), strict=True):
        made[content] = min(maker, made.get(content, maker))
    pool = a.pool.items()
    floating = {number for number in np.unique(b.reads.dtype).tolist() if str(pool[number]) in EPS}
    seen: dict[int, tuple[float, int]] = {}
    total: set[int] = set()
    batch = False
    for row in np.flatnonzero(outside).tolist():
        content = int(b.reads.hash[reads.b[row]])
        reader = place_b[int(alignment.b[reads.pair[row]])]
        if content and made.get(content, reader) < reader:
            continue  # made earlier in the step by a call that hands it on unseen
        if int(b.reads.dtype[reads.b[row]]) not in floating:
            batch |= not bool(reads.equal[row]) and float(b.reads.numel[reads.b[row]]) > 1
            continue
        total.add(content)
        if not reads.equal[row]:
            size = float(reads.difference[row]) if np.isfinite(reads.difference[row]) else float("inf")
            known = seen.get(content)
            module = b.kind[alignment.b[reads.pair[row]]] == _MODULE
            if known is None or (module and b.kind[alignment.b[reads.pair[known[1]]]] != _MODULE):
                seen[content] = size, row
    if not seen:
        return [], 0.0, 0.0, (), batch
    share = len(seen) / max(len(total), 1)
    ordered = sorted(seen.values(), key=lambda item: (-item[0], item[1]))
    known_names = parameter_names(b)
    names = tuple(_input_name(b, divergence, row, known_names) for _, row in ordered)
    found: list[Finding] = []
    module_pairs = {
        b.calls[int(alignment.b[pair])].module: pair
        for pair in np.flatnonzero(b.kind[alignment.b] == _MODULE).tolist()
    }
    if share <= MOSTLY:
        for (size, row), name in zip(ordered, names, strict=True):
            owner = known_names.get(int(b.reads.hash[reads.b[row]]), ("", ""))[1]
            pair = module_pairs.get(owner, int(reads.pair[row])) if owner else int(reads.pair[row])
            found.append(
                Finding(
                    tier=ENTERED,
                    place=float(place_b[int(alignment.b[reads.pair[row]])]),
                    origin="entered",
                    basis="digest",
                    reason=f"{name} already differs when the step begins, by {size:.2g} of its largest value",
                    pair=pair,
                    module=owner,
                )
            )
    return found, share, ordered[0][0], names, batch


def parameter_names(columns: Columns) -> dict[int, tuple[str, str]]:
    """Contents of parameters -> (full name, module FQN), as the innermost module that uses them says."""
    names: dict[int, tuple[str, str]] = {}
    for at in np.flatnonzero(columns.kind == _MODULE).tolist():
        call = columns.calls[at]
        first = int(columns.reads.start[at]) + len(call.inputs)
        for place, record in enumerate(
            reads_of(call)[len(call.inputs) : len(call.inputs) + len(call.params)]
        ):
            content = int(columns.reads.hash[first + place])
            known = names.get(content)
            if content and (known is None or len(call.module) > len(known[1])):
                names[content] = f"{call.module}.{record.name}".lstrip("."), call.module
    return names


def _input_name(b: Columns, divergence: Divergence, row: int, names: dict[int, tuple[str, str]]) -> str:
    named = names.get(int(b.reads.hash[divergence.reads.b[row]]))
    if named is not None:
        return named[0]
    call = b.calls[int(divergence.alignment.b[divergence.reads.pair[row]])]
    at = int(divergence.reads.b[row]) - int(
        b.reads.start[int(divergence.alignment.b[divergence.reads.pair[row]])]
    )
    records = reads_of(call)
    name = records[at].name if at < len(records) else "?"
    if call.kind == "module":
        return (
            f"{call.module}.{name}".lstrip(".") if at >= len(call.inputs) else f"input {name} of {call.key}"
        )
    return f"input {name} of {call.key}"


def _not_cleared(
    a: Columns, b: Columns, divergence: Divergence, level: Floats, findings: list[Finding]
) -> list[Finding]:
    """Drop findings inside a module that as a whole agrees within rounding: its formula was rearranged.

    Other arguments of the same ops stay, since nothing was rearranged there.
    """
    alignment = divergence.alignment
    agree = _agreeing_modules(b, divergence, level)
    rearranged = {call.module for at in alignment.only_a.tolist() for call in (a.calls[at],)}
    rearranged |= {call.module for at in alignment.only_b.tolist() for call in (b.calls[at],)}
    kept = []
    other_optimizer = optimizer_differs(a, b, alignment)
    for finding in findings:
        call = call_of(a, b, alignment, finding)
        if other_optimizer and call.phase == "optimizer" and finding.basis != "replay":
            continue
        phase = "forward" if call.phase in ("forward", "recompute") else call.phase
        whole = call.kind != "module" and agree.get((call.module, phase, call.rank))
        told = finding.basis == "structure" and finding.pair >= 0
        if not whole or (told and call.module not in rearranged):
            kept.append(finding)
    return kept


def optimizer_differs(a: Columns, b: Columns, alignment: Alignment) -> bool:
    """The optimizer runs other ops on both sides (fused, foreach, a loop): its steps have no counterparts."""
    step = PHASES.index("optimizer")
    alone_a, alone_b = a.phase[alignment.only_a] == step, b.phase[alignment.only_b] == step
    return bool(alone_a.any() and alone_b.any())


def _agreeing_modules(b: Columns, divergence: Divergence, level: Floats) -> dict[tuple[str, str, int], bool]:
    """(module, phase, rank) -> what it makes agrees within rounding, given what it reads."""
    alignment = divergence.alignment
    agree: dict[tuple[str, str, int], bool] = {}
    for pair in np.flatnonzero(b.kind[alignment.b] == _MODULE).tolist():
        call = b.calls[int(alignment.b[pair])]
        floor = float(divergence.noise[pair])
        inside = float(np.fmax(divergence.in_difference[pair], level[pair]))
        for phase, made, read in (
            ("forward", divergence.out_difference[pair], inside),
            ("backward", divergence.backward[pair], np.fmax(inside, divergence.backward_in[pair])),
        ):
            if np.isnan(made):
                continue
            limit = floor if read == 0 else AMPLIFICATION * (floor + float(np.nan_to_num(read)))
            shifted = phase == "forward" and read == 0 and bool(divergence.biased[pair])
            key = call.module, phase, call.rank
            agree[key] = agree.get(key, True) and bool(made <= limit) and not shifted
    return agree


def call_of(a: Columns, b: Columns, alignment: Alignment, finding: Finding) -> Call:
    """The call that a finding is about: B's, or A's where B has none."""
    if finding.pair >= 0:
        return b.calls[int(alignment.b[finding.pair])]
    return b.calls[finding.only_b] if finding.only_b >= 0 else a.calls[finding.only_a]


def _without_outer(a: Columns, b: Columns, divergence: Divergence, findings: list[Finding]) -> list[Finding]:
    """Drop module calls that contain another finding of their phase, and modules around such modules."""
    calls = [call_of(a, b, divergence.alignment, finding) for finding in findings]
    kept = []
    for number, (finding, call) in enumerate(zip(findings, calls, strict=True)):
        if call.kind != "module":
            if not _inside_another(calls, call):
                kept.append(finding)
            continue
        inside = any(
            (other.module == call.module or other.module.startswith(f"{call.module}." if call.module else ""))
            and (other.kind != "module" or len(other.module) > len(call.module))
            and findings[at].tier <= finding.tier
            and other.rank == call.rank
            for at, other in enumerate(calls)
            if at != number
        )
        if not inside:
            kept.append(finding)
    return kept


def _inside_another(calls: list[Call], call: Call) -> bool:
    """Whether an op or launch ran inside an op that is found as well (a wrapper's, a kernel's own)."""
    return any(
        other.rank == call.rank
        and other.kind == "op"
        and other.index != call.index
        and (other.index == call.parent or any(record.producer == call.index for record in other.outputs))
        for other in calls
    )


def _origins(
    b: Columns,
    divergence: Divergence,
    findings: list[Finding],
    place_b: Floats,
    partner_b: Ints,
    level: Floats,
) -> tuple[Ints, Bools]:
    """Origin per pair, and which pairs descend from a finding (along producers, in execution order)."""
    alignment = divergence.alignment
    origin = np.zeros(len(alignment), np.int64)
    module = b.kind == _MODULE
    named = {finding.pair: finding for finding in findings if finding.pair >= 0}
    own_b = {finding.only_b for finding in findings if finding.only_b >= 0}
    makers = {
        maker
        for finding in findings
        if finding.pair >= 0 and module[int(alignment.b[finding.pair])]
        for maker in makers_of(b, int(alignment.b[finding.pair]), backward=finding.backward)
    }
    missing = any(finding.only_a >= 0 for finding in findings)
    first_missing = min((finding.place for finding in findings if finding.only_a >= 0), default=np.inf)
    tainted_call = np.zeros(len(b), bool)
    tainted = np.zeros(len(alignment), bool)
    differs = np.ones(len(b), bool)
    differs[alignment.b] = ~(divergence.out_equal & divergence.in_equal)
    start, producer = b.reads.start, b.reads.producer
    order = np.lexsort((b.rank, b.index, b.step))
    for call in order[differs[order]].tolist():
        pair = int(partner_b[call])
        made = producer[start[call] : start[call + 1]]
        inherits = bool(tainted_call[made[made >= 0]].any())
        if missing and place_b[call] >= first_missing and pair >= 0 and not divergence.in_equal[pair]:
            inherits = True
        own = pair in named or call in own_b or call in makers
        tainted_call[call] = own or inherits
        if pair < 0:
            continue
        tainted[pair] = own or (inherits and not divergence.out_equal[pair])
        if pair in named:
            origin[pair] = ORIGINS.index(named[pair].origin)
        elif not divergence.out_equal[pair] and (inherits or not divergence.in_equal[pair]):
            inputs = np.fmax(divergence.in_difference[pair], level[pair])
            grown = divergence.out_difference[pair] > 8 * inputs + divergence.noise[pair]
            origin[pair] = ORIGINS.index("amplified" if grown and not module[call] else "inherited")
    return origin, tainted


def row_order(a: Columns, b: Columns, divergence: Divergence) -> Ints:
    """Order of the document's rows; see `execution_order`."""
    return execution_order(a, b, divergence.alignment)


def phase_of(call: Call) -> int:
    return PHASES.index(call.phase)
