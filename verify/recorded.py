"""`--target recorded`: judge what the run itself produced, say a cluster's run on a laptop."""

from __future__ import annotations

from dataclasses import replace

from bridge.errors import UsageError
from bridge.verify.bind import Bindings
from bridge.verify.case import Case
from bridge.verify.spec import KernelSpec


def only_recorded(spec: KernelSpec, bound: Bindings) -> tuple[KernelSpec, Bindings]:
    """Leave what the run recorded: calls with all outputs, and gradients that every such call has.

    Raises:
        UsageError: no call has its outputs.
    """
    whole = [
        (case, call)
        for case, call in zip(bound.cases, bound.calls, strict=True)
        if case.recorded is not None and all(name in case.recorded.outputs for name in spec.outputs)
    ]
    if not whole:
        raise UsageError(
            f"the run recorded no outputs of {spec.name}, so there is nothing to judge; "
            "capture again with --tensors all"
        )
    grads = tuple(name for name in spec.grads if all(name in _recorded_grads(case) for case, _ in whole))
    left_out = list(bound.left_out)
    lacking = [f"grad_{name}" for name in spec.grads if name not in grads]
    if lacking:
        left_out.append(f"{', '.join(lacking)}: the run recorded no such gradient")
    if len(whole) < len(bound.cases):
        left_out.append(f"{len(bound.cases) - len(whole)} calls without recorded outputs")
    left_out.append(
        "drawn inputs, repeats and memory checks: the recorded outputs are judged, no kernel is run"
    )
    return replace(spec, grads=grads), Bindings(
        cases=tuple(case for case, _ in whole),
        calls=tuple(call for _, call in whole),
        left_out=tuple(left_out),
    )


def _recorded_grads(case: Case) -> tuple[str, ...]:
    return tuple(case.recorded.grads) if case.recorded is not None else ()
