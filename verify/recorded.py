"""`--target recorded`: judge what the run itself produced, say a cluster's run on a laptop."""

from __future__ import annotations

from dataclasses import replace

from bridge.errors import UsageError
from bridge.verify.bind import Bindings
from bridge.verify.sites import plural
from bridge.verify.spec import KernelSpec


def only_recorded(spec: KernelSpec, bound: Bindings) -> tuple[KernelSpec, Bindings]:
    """Leave what the run recorded: calls with all outputs, and gradients that every such call has.

    Raises:
        UsageError: no call has its outputs.
    """
    whole = tuple(item for item in bound.bound if item.recorded.issuperset(spec.outputs))
    if not whole:
        raise UsageError(
            f"the run recorded no outputs of {spec.name}, so there is nothing to judge; "
            "capture again with --tensors all"
        )
    grads = tuple(name for name in spec.grads if all(f"grad_{name}" in item.recorded for item in whole))
    left_out = list(bound.left_out)
    lacking = [f"grad_{name}" for name in spec.grads if name not in grads]
    if lacking:
        left_out.append(f"{', '.join(lacking)}: the run recorded no such gradient")
    if len(whole) < len(bound.bound):
        left_out.append(f"{plural(len(bound.bound) - len(whole))} without recorded outputs")
    left_out.append(
        "drawn inputs, repeats and memory checks: the recorded outputs are judged, no kernel is run"
    )
    return replace(spec, grads=grads), Bindings(bound=whole, left_out=tuple(left_out))
