"""What it means that a target raised: its words, and whether that is the kernel's fault."""

from __future__ import annotations

import re
from collections.abc import Mapping

from bridge.verify.case import Case
from bridge.verify.spec import KernelSpec

#: How the structure of a tensor begins that the target raised instead of returning.
RAISED = "target raised "
#: How Triton's compiler begins: with the place; what is wrong there is on the last line.
_PLACE = re.compile(r"at \d+:\d+:")
_LONGEST = 200


def in_words(error: BaseException) -> str:
    """Class and message on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    if _PLACE.match(text) and len(lines) > 1:
        text = f"{text} {lines[-1]}"
    return f"{type(error).__name__}: {text[:_LONGEST]}" if text else type(error).__name__


def broke_gpu(error: BaseException) -> bool:
    """Whether the process cannot go on: after an illegal access every use of the GPU raises."""
    return "CUDA error" in str(error)


def lacks_memory(error: BaseException) -> bool:
    """Whether the machine is too small for the case, which says nothing about the kernel."""
    import torch

    return isinstance(error, MemoryError | torch.OutOfMemoryError)


def told_inputs(spec: KernelSpec, case: Case) -> str:
    """ "x (4, 16) float32, weight (16,) float32"."""
    named = zip(spec.inputs, case.inputs, strict=True)
    return ", ".join(f"{n} {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for n, t in named)


def fault(spec: KernelSpec, case: Case, error: BaseException) -> str:
    """The structure of every tensor of a case that the target raised on, without the leading "target"."""
    return f"{RAISED.removeprefix('target ')}{in_words(error)} on {told_inputs(spec, case)}"


def gradless(spec: KernelSpec, grads: Mapping[str, object]) -> str | None:
    """The one-line error about a reference that gives no gradient at all where some are judged; else None."""
    if not spec.grads or any(grad is not None for grad in grads.values()):
        return None
    return (
        f"the reference of {spec.name} must give the gradients that `grads` names ({', '.join(spec.grads)}), "
        "got none; compute its result from the inputs without detaching, or leave out `grads`"
    )


def refusal(spec: KernelSpec, case: Case, who: str, error: BaseException) -> str:
    """The one-line error about a reference that raises, or a target that ran nowhere."""
    return (
        f"the {who} of {spec.name} must run on case {case.name!r} ({told_inputs(spec, case)}), "
        f"got {in_words(error)}; run it on such inputs by itself, or take the shape or dtype out of the spec"
    )
