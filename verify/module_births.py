"""Modules that make something else of bit-equal inputs, element by element. Needs torch and tensors."""

from __future__ import annotations

import math

import numpy as np

from bridge.capture.store import Capture
from bridge.errors import CaptureError, KernelError
from bridge.verify.chain import run_chain
from bridge.verify.chain_gate import distance, judge_chain
from bridge.verify.columns import KINDS, OUTPUT, Columns, take
from bridge.verify.diff_document import Attribution
from bridge.verify.divergence import Divergence


def module_births(
    capture_a: Capture, capture_b: Capture, a: Columns, b: Columns, divergence: Divergence
) -> dict[int, Attribution]:
    """Module calls that make of bit-equal inputs outputs further apart than rounding, element by element."""
    alignment = divergence.alignment
    modules = a.kind[alignment.a] == KINDS.index("module")
    found = {}
    for pair in np.flatnonzero(modules & divergence.in_equal & ~divergence.out_equal).tolist():
        call_a, call_b = a.calls[int(alignment.a[pair])], b.calls[int(alignment.b[pair])]
        records = list(zip(call_a.outputs, call_b.outputs, strict=False))
        if any(left.blob is None or right.blob is None for left, right in records):
            continue
        born = max((distance(capture_a.tensor(x), capture_b.tensor(y)) for x, y in records), default=0.0)
        floor = float(divergence.noise[pair])
        if born > floor and not _exact_enough(capture_a, capture_b, a, b, divergence, pair):
            found[pair] = Attribution(
                origin="born",
                basis="replay",
                born=born if math.isfinite(born) else None,
                detail=f"inputs are bit-equal; outputs differ by {born:.2g}, rounding explains {floor:.2g}",
            )
    return found


def _exact_enough(
    capture_a: Capture, capture_b: Capture, a: Columns, b: Columns, divergence: Divergence, pair: int
) -> bool:
    """Whether B's module is as near as A's to what A's ops make of the same inputs in FP64.

    Asked of modules that differ by more than the floor, which knows nothing of a sum that cancels inside.
    """
    at_a, at_b = int(divergence.alignment.a[pair]), int(divergence.alignment.b[pair])
    made = [int(a.writes.producer[row]) for row in take(a.writes, at_a) if a.writes.role[row] == OUTPUT]
    if len(made) != 1 or made[0] < 0:
        return False
    last, module = a.calls[made[0]], a.calls[at_a].module
    run = [
        at
        for at in np.flatnonzero((a.kind == KINDS.index("op")) & (a.phase == a.phase[at_a])).tolist()
        if a.index[at] > a.index[at_a] and a.index[at] <= last.index and a.rank[at] == a.rank[at_a]
        and f"{a.calls[at].module}.".startswith(f"{module}.")
    ]  # fmt: skip
    try:
        golden = run_chain(capture_a, a, run, {}, last, wide=True)
        left, right = capture_a.tensor(last.outputs[0]), capture_b.tensor(b.calls[at_b].outputs[0])
    except (KernelError, CaptureError):
        return False
    if left.shape != right.shape or golden.shape != right.shape:
        return False
    gate = judge_chain(last, last.outputs[0].name, golden=golden, eager=left, target=right)
    return gate.verdict == "PASS"
