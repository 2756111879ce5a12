"""Wrong variants that only diagnosis tries: they are many, or fitted to what the target returned."""

from __future__ import annotations

from bridge.verify.discrete import of_discrete
from bridge.verify.evidence import Evidence
from bridge.verify.fitted import fitted
from bridge.verify.misread import of_inputs
from bridge.verify.naive import of_calls
from bridge.verify.spec import KernelSpec
from bridge.verify.stale import of_operands
from bridge.verify.tiled import of_tiles
from bridge.verify.trace import record
from bridge.verify.variant import Variant, numbered
from bridge.verify.variants import catalogue


def suspects(spec: KernelSpec, e: Evidence, tiles: tuple[int, ...]) -> list[Variant]:
    """Every variant on one case: the generic ones, then those that would be too many for power."""
    trace = record(spec, e.case)
    found = [*of_calls(spec, e.case), *of_inputs(spec, e.case)]
    for op in trace.ops.values():
        found += of_tiles(op, trace, tiles)
        found += of_discrete(op)
        found += of_operands(op, trace)
    found += fitted(spec, trace, e)
    return [*catalogue(spec, trace, e.case, tiles), *numbered(found)]
