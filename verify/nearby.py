"""Small results are compared on the host.

Comparing takes hundreds of small operations; on a GPU each costs a launch, and each number read back a
synchronisation, which is most of the time of a verification. Golden and the noise envelope of a small case
are computed on the host too; reference and target always run where the case is.
"""

from __future__ import annotations

import dataclasses

import torch

from bridge.verify.case import Case
from bridge.verify.execute import Result

#: Cases with more input elements stay on their device.
_SMALL = 1 << 16


def beside(result: Result, case: Case) -> bool:
    """Whether every tensor is on the case's device; one elsewhere is a fault to show, not to hide."""
    device = case.inputs[0].device if case.inputs else torch.device("cpu")
    tensors = [*result.outputs.values(), *(t for others in result.differing.values() for t in others)]
    tensors += [t for t in result.grads.values() if t is not None]
    return all(t.device == device for t in tensors)


def near_case(case: Case) -> Case:
    """The case with its tensors on the host, layout kept, when it is small; the case itself otherwise."""
    device = case.inputs[0].device if case.inputs else torch.device("cpu")
    if device.type == "cpu" or sum(t.numel() for t in case.inputs) > _SMALL:
        return case
    return dataclasses.replace(
        case,
        inputs=tuple(_moved(t, "cpu") for t in case.inputs),
        grad_outputs=tuple(_moved(t, "cpu") for t in case.grad_outputs),
    )


def far_case(case: Case, device: str) -> Case:
    """The case with its tensors on `device`, where the target ran; the case itself when they are there."""
    if not case.inputs or str(case.inputs[0].device) == device:
        return case
    return dataclasses.replace(
        case,
        inputs=tuple(_moved(t, device) for t in case.inputs),
        grad_outputs=tuple(_moved(t, device) for t in case.grad_outputs),
    )


def near_result(result: Result, case: Case) -> Result:
    """`result` on the device of `case`."""
    if not case.inputs or case.inputs[0].device.type != "cpu":
        return result
    return dataclasses.replace(
        result,
        outputs={name: t.cpu() for name, t in result.outputs.items()},
        grads={name: None if t is None else t.cpu() for name, t in result.grads.items()},
        differing={name: [t.cpu() for t in others] for name, others in result.differing.items()},
    )


def _moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A copy on `device` with the same sizes, strides, offset and surroundings."""
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage()).to(device)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
