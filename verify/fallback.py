"""Did the target run a kernel at all? A silent eager fallback must not be judged as one."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bridge.verify.case import Case
from bridge.verify.execute import run
from bridge.verify.spec import KernelSpec

#: Operators that move or make memory; a kernel's wrapper may use them, and they compute nothing.
_HOUSEKEEPING = frozenset(
    "alias as_strided clone contiguous copy_ detach empty empty_like empty_strided expand fill_ full "
    "full_like lift_fresh new_empty new_empty_strided new_zeros ones ones_like permute reshape select set_ "
    "slice squeeze sum t to _to_copy transpose unsqueeze view zero_ zeros zeros_like _unsafe_view".split()
)


class _Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.computed: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.name().partition("::")
        if namespace == "aten" and name.partition(".")[0] not in _HOUSEKEEPING:
            self.computed[f"aten::{name.partition('.')[0]}"] = None
        return func(*args, **(kwargs or {}))


def eager_operators(spec: KernelSpec, case: Case) -> tuple[str, ...]:
    """Arithmetic operators of torch's own that the target ran on a case, in first-seen order.

    Called for a target that launched no kernel: () then means that something invisible from here did the
    work (a compiled extension), anything else that the target is an eager formula.
    """
    with _Ops() as ops, torch.enable_grad():
        run(spec.target, spec, case)
    return tuple(ops.computed)


def complaint(spec: KernelSpec, case: Case) -> str | None:
    """Why a target that launched nothing does not count as a kernel, in words; None: it does."""
    ran = eager_operators(spec, case)
    if not ran:
        return None
    shown = ", ".join(ran[:4]) + (", ..." if len(ran) > 4 else "")
    return (
        f"{spec.name} launched no kernel: the target ran eager operators instead ({shown}), and an eager "
        "fallback is not judged as a kernel"
    )
