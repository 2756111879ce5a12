"""Tensors that differ when the step begins: parameters, buffers, the batch."""

from __future__ import annotations

import numpy as np

from bridge.verify.columns import GRAD_OUTPUT, KINDS, Columns, Floats, reads_of
from bridge.verify.divergence import Divergence
from bridge.verify.finding import ENTERED, Finding
from bridge.verify.floors import EPS

#: When more than this share of a step's float inputs differ at entry, they come from earlier steps.
MOSTLY = 0.5

_MODULE = KINDS.index("module")


def entered_findings(
    a: Columns, b: Columns, divergence: Divergence, place_b: Floats
) -> tuple[list[Finding], float, float, tuple[str, ...], bool]:
    """Tensors from outside the step that differ: parameters, buffers, the batch."""
    reads, alignment = divergence.reads, divergence.alignment
    outside = (a.reads.producer[reads.a] < 0) & (b.reads.producer[reads.b] < 0) & reads.comparable
    outside &= reads.role != GRAD_OUTPUT
    made: dict[int, float] = {}
    wanted = np.isin(b.writes.hash, b.reads.hash[reads.b[outside]])
    makers = place_b[b.writes.call[wanted]]
    for content, maker in zip(b.writes.hash[wanted].tolist(), makers.tolist(), strict=True):
        made[content] = min(maker, made.get(content, maker))
    pool = a.pool.items()
    floating = {number for number in np.unique(b.reads.dtype).tolist() if str(pool[number]) in EPS}
    seen: dict[int, tuple[float, int]] = {}
    total: set[int] = set()
    batch = False
    for row in np.flatnonzero(outside).tolist():
        content = _content(b, int(reads.b[row]))
        reader = place_b[int(alignment.b[reads.pair[row]])]
        if content and made.get(content, reader) < reader:
            continue  # made earlier in the step by a call that hands it on unseen
        if int(b.reads.dtype[reads.b[row]]) not in floating:
            batch |= not bool(reads.equal[row]) and float(b.reads.numel[reads.b[row]]) > 1
            continue
        total.add(content)
        if not reads.equal[row] and not reads.difference[row] <= divergence.precision:
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
        b.text(int(b.module[alignment.b[pair]])): pair
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


def _content(columns: Columns, row: int) -> int:
    """A number for what a tensor holds: its hash, or of joined ranks, which have none, its sums."""
    reads = columns.reads
    return int(reads.hash[row]) or hash((float(reads.abs_sum[row]), float(reads.sq_sum[row])))


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
