"""Where differences come from, as far as digests, arguments and the graph can tell (no tensors needed).

Each finding is a place where something happens that its inputs do not explain. They come in tiers of
evidence; within a tier, the first in execution order is the first suspect. Attribution by replay, which
needs tensors, is in `counterfactual` and overrules what is found here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from bridge.capture.record import Call
from bridge.verify.align import Alignment
from bridge.verify.births import (
    GAIN,
    born_findings,
    differing_arguments,
    rounding_levels,
    shown_later,
    told_findings,
    unseen_findings,
)
from bridge.verify.columns import (
    GRAD_INPUT,
    KINDS,
    OUTPUT,
    PHASES,
    Bools,
    Columns,
    Floats,
    Ints,
    take,
)
from bridge.verify.diff_document import ORIGINS
from bridge.verify.divergence import Divergence
from bridge.verify.entered import entered_findings
from bridge.verify.finding import ENTERED, Arguments, Finding
from bridge.verify.gateways import gateways

#: Growth of a rounding difference through a whole module that is still no sign of a fault.
AMPLIFICATION = 8.0

#: A call whose outputs differ this many times more than its inputs, beyond the floor, amplifies.
GROWN = 8.0

_MODULE = KINDS.index("module")


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
    arguments = differing_arguments(a, b, divergence)
    level = rounding_levels(b, divergence)
    partner_b = np.full(len(b), -1, np.int64)
    partner_b[alignment.b] = np.arange(len(alignment))
    findings = [
        *born_findings(a, b, divergence, place_b, arguments, level),
        *told_findings(a, b, divergence, place_b, arguments),
        *gateways(a, b, divergence, place_b, partner_b),
        *unseen_findings(a, b, divergence, place_b),
    ]
    entered, share, worst, names, batch = entered_findings(a, b, divergence, place_b)
    findings = _not_cleared(a, b, divergence, level, findings)
    # In rearranged code other arguments and wiring are to be expected, unless something comes of them.
    silent = shown_later(a, b, divergence) <= GAIN * divergence.noise
    findings = [f for f in findings if not (f.basis == "structure" and f.pair >= 0 and silent[f.pair])]
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
    level = rounding_levels(b, divergence)
    findings = _without_outer(a, b, divergence, _not_cleared(a, b, divergence, level, findings))
    base, tainted = _origins(b, divergence, findings, _places(b), partner_b, level)
    # A replayed call that makes another intermediate in a module that agrees is neither here nor there.
    kept = {finding.pair for finding in findings}
    cleared = [pair for pair in np.flatnonzero(origin == ORIGINS.index("born")).tolist() if pair not in kept]
    origin[cleared] = 0
    base[cleared] = 0
    replayed = origin != found.origin
    return replace(found, findings=tuple(findings), origin=np.where(replayed, origin, base), tainted=tainted)


def _places(columns: Columns) -> Floats:
    """Rank of each call in execution order."""
    places = np.zeros(len(columns))
    places[np.lexsort((columns.rank, columns.index, columns.step))] = np.arange(len(columns))
    return places


def _not_cleared(
    a: Columns, b: Columns, divergence: Divergence, level: Floats, findings: list[Finding]
) -> list[Finding]:
    """Drop findings inside a module that as a whole agrees within rounding: its formula was rearranged.

    Other arguments of the same ops stay, since nothing was rearranged there.
    """
    alignment = divergence.alignment
    agree = _agreeing_modules(b, divergence, level)
    alone = np.concatenate([a.module[alignment.only_a], b.module[alignment.only_b]])
    rearranged = {b.text(number) for number in np.unique(alone).tolist()}
    kept = []
    other_optimizer = optimizer_differs(a, b, alignment)
    for finding in findings:
        call = call_of(a, b, alignment, finding)
        if other_optimizer and call.phase == "optimizer" and finding.basis != "replay":
            continue
        phase = "forward" if call.phase in ("forward", "recompute") else call.phase
        whole = call.kind != "module" and agree.get((call.module, phase, call.rank))
        told = finding.basis == "structure" and finding.pair >= 0
        if finding.tier == ENTERED or not whole or (told and call.module not in rearranged):
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
        at = int(alignment.b[pair])
        module, rank = b.text(int(b.module[at])), int(b.rank[at])
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
            key = module, phase, rank
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
        if finding.tier == ENTERED:
            kept.append(finding)  # names a tensor, not a call: nothing inside explains it
            continue
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
    tainted_call = [False] * len(b)
    tainted, handed = np.zeros(len(alignment), bool), np.zeros(len(alignment), bool)
    differs = np.ones(len(b), bool)
    differs[alignment.b] = ~(divergence.out_equal & divergence.in_equal)
    start, producer = b.reads.start.tolist(), b.reads.producer.tolist()
    out_equal, in_equal = divergence.out_equal.tolist(), divergence.in_equal.tolist()
    pairs = partner_b.tolist()
    order = np.lexsort((b.rank, b.index, b.step))
    for call in order[differs[order]].tolist():
        pair = pairs[call]
        inherits = any(made >= 0 and tainted_call[made] for made in producer[start[call] : start[call + 1]])
        if missing and pair >= 0 and not in_equal[pair] and place_b[call] >= first_missing:
            inherits = True
        own = pair in named or call in own_b or call in makers
        tainted_call[call] = own or inherits
        if pair >= 0:
            handed[pair] = inherits
            tainted[pair] = own or (inherits and not out_equal[pair])
    came = ~divergence.out_equal & (handed | ~divergence.in_equal)
    with np.errstate(invalid="ignore"):
        limit = GROWN * np.fmax(divergence.in_difference, level) + divergence.noise
        grown = (divergence.out_difference > limit) & ~module[alignment.b]
    origin[came] = np.where(grown[came], ORIGINS.index("amplified"), ORIGINS.index("inherited"))
    for pair, finding in named.items():
        origin[pair] = ORIGINS.index(finding.origin)
    return origin, tainted
