"""Repeats that are run in another way than the first call: other bits are legal, other values are not."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bridge.verify.execute import Result
from bridge.verify.verdict import TensorVerdict


def repeats_blamed(tensors: Sequence[TensorVerdict], target: Result) -> list[TensorVerdict]:
    """`tensors`, with the reason of those that only such a repeat gets wrong; the target is told too.

    Args:
        tensors: the first result of each name before its repeats, as they were judged.
    """
    first: dict[str, str] = {}
    found = []
    for tensor in tensors:
        said = target.doubted.get(tensor.tensor)
        if said and tensor.verdict == "FAIL" and first.get(tensor.tensor) not in (None, "FAIL"):
            target.faults.setdefault(tensor.tensor, said)
            tensor = msgspec.structs.replace(tensor, reason=f"{said}: {tensor.reason}")
        first.setdefault(tensor.tensor, tensor.verdict)
        found.append(tensor)
    return found
