"""Tensors that differ when the step begins: parameters, buffers, the batch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bridge.verify.columns import GRAD_OUTPUT, KINDS, Columns, Floats, reads_of
from bridge.verify.diff_document import Mismatch
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
    rows = np.flatnonzero(outside)
    at_b, equal = reads.b[rows], reads.equal[rows]
    hashes, dtypes = b.reads.hash[at_b], b.reads.dtype[at_b]
    # Made earlier in the step by a call that hands it on unseen.
    handed_on = _first_made(b, place_b, hashes) < place_b[alignment.b[reads.pair[rows]]]
    pool = a.pool.items()
    floats = [number for number in np.unique(b.reads.dtype).tolist() if str(pool[number]) in EPS]
    floating = np.isin(dtypes, floats)
    batch = bool((~handed_on & ~floating & ~equal & (b.reads.numel[at_b] > 1)).any())
    counted = ~handed_on & floating
    total = len(np.unique(hashes[counted & (hashes != 0)]))
    total += len({_content(b, row) for row in at_b[counted & (hashes == 0)].tolist()})
    seen: dict[int, tuple[float, int]] = {}
    for row in rows[counted & ~equal].tolist():
        if not reads.difference[row] <= divergence.precision:
            content = _content(b, int(reads.b[row]))
            size = float(reads.difference[row]) if np.isfinite(reads.difference[row]) else float("inf")
            known = seen.get(content)
            module = b.kind[alignment.b[reads.pair[row]]] == _MODULE
            if known is None or (module and b.kind[alignment.b[reads.pair[known[1]]]] != _MODULE):
                seen[content] = size, row
    if not seen:
        return [], 0.0, 0.0, (), batch
    share = len(seen) / max(total, 1)
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


def _first_made(columns: Columns, place: Floats, hashes: npt.NDArray[np.uint64]) -> Floats:
    """Per content where in the step a call first makes it; infinite: none does, or it has no hash."""
    writes = columns.writes
    names, number = np.unique(writes.hash, return_inverse=True)
    first = np.full(len(names) + 1, np.inf)
    np.minimum.at(first, number.reshape(-1), place[writes.call])
    found = np.searchsorted(names, hashes)
    known = (hashes != 0) & (np.append(names, np.uint64(0))[found] == hashes)
    return np.where(known, first[found], np.inf)


def batch_mismatch(a: Columns, b: Columns, tokens_differ: bool) -> Mismatch | None:
    """What differs in the data of the step: the sizes of what the model was given, or its values."""
    given = _given(a), _given(b)
    # A mask that only one of the runs is given is code, not data.
    other = [name for name, shape in given[0].items() if given[1].get(name, shape) != shape]
    if other:
        said = [", ".join(dict.fromkeys("x".join(map(str, each[name])) for name in other)) for each in given]
        return Mismatch(
            what="batch", a=said[0], b=said[1], meaning="the runs saw batches of other sizes in this step"
        )
    if not tokens_differ:
        return None
    return Mismatch(
        what="batch", a="its tokens", b="other tokens", meaning="the runs saw other data in this step"
    )


def _given(columns: Columns) -> dict[str, tuple[int, ...]]:
    """Shapes of what the whole model was first called with, by the names of its inputs."""
    for at in np.flatnonzero(columns.kind == _MODULE).tolist():
        call = columns.calls[at]
        if call.module == "":
            return {record.name: record.shape for record in call.inputs}
    return {}


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
            # A module that was captured as a whole lists the parameters of those inside it too.
            full = f"{call.module}.{record.name}".lstrip(".")
            owner = full.rpartition(".")[0]
            if content and (known is None or len(owner) > len(known[1])):
                names[content] = full, owner
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
