"""Captured calls over lists of tensors, as fused and foreach optimizers make them, item by item. No torch."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bridge.capture.record import Call, TensorRecord


def items(call: Call) -> tuple[Call, ...]:
    """One call per position of the tensor lists, its arguments named by their place alone: "0.7" becomes "0".

    What the call wrote over is found under the same names among the outputs. Lists that are empty and
    arguments that are no list belong to every item; a call without lists comes back as it is.
    """
    count = _length(call.inputs)
    if count is None:
        return (call,)
    return tuple(
        msgspec.structs.replace(
            call,
            key=f"{call.key}[{place}]",
            inputs=_at(call.inputs, place),
            outputs=_at(call.outputs, place),
            mutated=tuple(
                name.partition(".")[0] for name in call.mutated if name.partition(".")[2] in ("", str(place))
            ),
        )
        for place in range(count)
    )


def _length(records: Sequence[TensorRecord]) -> int | None:
    """Number of tensors in each list; None where there is no list, or lists differ in length."""
    lists: dict[str, int] = {}
    for record in records:
        name, dot, place = record.name.partition(".")
        if dot and place.isdigit():
            lists[name] = lists.get(name, 0) + 1
    lengths = set(lists.values())
    return lengths.pop() if len(lengths) == 1 else None


def _at(records: Sequence[TensorRecord], place: int) -> tuple[TensorRecord, ...]:
    """The records of one position, under the names of their lists, with those of no list."""
    return tuple(
        msgspec.structs.replace(record, name=name)
        for record in records
        for name, _, at in (record.name.partition("."),)
        if at in ("", str(place))
    )
