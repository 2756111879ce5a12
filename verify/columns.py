"""The calls of one run as numpy columns, so that 100,000 of them are compared without a Python loop.

Strings become numbers of a pool that both runs share; equal numbers mean equal strings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bridge.capture.record import Call, TensorRecord

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

KINDS = ("op", "module", "launch")
PHASES = ("forward", "recompute", "backward", "optimizer", "other")

#: Roles of a call's tensors; the first three are read, the last two written.
INPUT, PARAM, GRAD_OUTPUT, OUTPUT, GRAD_INPUT = range(5)
ROLES = ("input", "param", "grad_output", "output", "grad_input")


class Numbers(dict[Any, int]):
    """Numbers for hashable things, given out in order of first sight by looking them up."""

    def __missing__(self, item: Any) -> int:
        number = self[item] = len(self)
        return number


class Pool:
    """Numbers for hashable things (strings, signatures), given out in order of first sight."""

    def __init__(self) -> None:
        self._numbers = Numbers()
        self._items: tuple[Any, ...] = ()

    def number(self, item: Any) -> int:
        return self._numbers[item]

    def numbers(self, items: Sequence[Any]) -> Ints:
        return np.fromiter(map(self._numbers.__getitem__, items), np.int64, len(items))

    def items(self) -> tuple[Any, ...]:
        if len(self._items) != len(self._numbers):
            self._items = tuple(self._numbers)
        return self._items


@dataclass(frozen=True, slots=True)
class Tensors:
    """One row per tensor use. `start[i]:start[i + 1]` are the rows of call i; NaN: not known."""

    start: Ints
    call: Ints
    role: Ints
    dtype: Ints  #: pool
    shape: Ints  #: pool of tuples
    numel: Floats
    count: Floats
    sum: Floats
    abs_sum: Floats
    sq_sum: Floats
    min: Floats
    max: Floats
    nan: Ints
    nonfinite: Ints  #: NaN among them
    hash: npt.NDArray[np.uint64]  #: 0: unknown; of the elements as they lie in memory
    order: Ints  #: pool of memory orders; hashes of one shape compare where these agree
    known: Bools  #: has a digest
    producer: Ints  #: position of the producing call; -1: from outside the step, or unknown
    stored: Bools
    void: Bools  #: no content that matters: unwritten memory, or what the call overwrites unread


@dataclass(frozen=True, slots=True)
class Columns:
    """One row per call, in the order of `calls`."""

    calls: Sequence[Call]
    pool: Pool
    key: Ints
    op: Ints
    module: Ints
    module_class: Ints
    phase: Ints  #: number in PHASES
    kind: Ints  #: number in KINDS
    rank: Ints
    step: Ints
    microbatch: Ints
    index: Ints
    signature: Ints  #: pool: shapes and dtypes of the outputs
    shapes: Ints  #: pool: shapes of the outputs
    input_shapes: Ints  #: pool: shapes of the inputs
    first_shape: Ints  #: pool: shape of the first output; -1: none
    parent: Ints  #: index of the call that this one ran inside; -1: none
    source: Ints  #: pool: source line; -1: not known
    told: Ints  #: pool: arguments and flags; equal numbers, equal ones
    reads: Tensors
    writes: Tensors

    def __len__(self) -> int:
        return len(self.key)

    def text(self, number: int) -> str:
        return str(self.pool.items()[number])


def short_op(op: str) -> str:
    """Give "mm" for "aten::mm.default" and for "mm"."""
    return op.rsplit("::", 1)[-1].split(".", 1)[0]


def is_empty(name: str) -> bool:
    """Whether an op, by its short name, hands out memory that nothing has written."""
    return name.removeprefix("new_").startswith("empty")


def _by_name(records: tuple[TensorRecord, ...]) -> tuple[TensorRecord, ...]:
    return tuple(sorted(records, key=lambda record: record.name))


def reads_of(call: Call) -> tuple[TensorRecord, ...]:
    """What a call reads, in the order of the columns: a module's parameters and gradients by name.

    Autograd makes gradients in an order of its own, which differs between implementations.
    """
    if call.kind != "module":
        return call.inputs
    return call.inputs + _by_name(call.params) + _by_name(call.grad_outputs)


def writes_of(call: Call) -> tuple[TensorRecord, ...]:
    """What a call writes, in the order of the columns."""
    return call.outputs if call.kind != "module" else call.outputs + _by_name(call.grad_inputs)


def take(tensors: Tensors, call: int) -> range:
    """Rows of one call."""
    return range(int(tensors.start[call]), int(tensors.start[call + 1]))


def inner_calls(columns: Columns) -> Ints:
    """Per call the position of the call that it ran inside of and whose outputs it made; -1: none.

    A custom op is followed by the kernel launches that do its work, a wrapper's op by the local one.
    """
    writes = columns.writes
    outer = np.full(len(columns), -1, np.int64)
    rows = (writes.producer >= 0) & (writes.producer != writes.call)
    rows &= (columns.kind[writes.call] != KINDS.index("module")) & (writes.role == OUTPUT)
    outer[writes.producer[rows]] = writes.call[rows]
    return outer


def owners(columns: Columns) -> dict[int, int]:
    """Per call that no module is known of (a custom backward), the module call whose gradients it made."""
    writes = columns.writes
    found: dict[int, int] = {}
    outer = inner_calls(columns)
    rows = np.flatnonzero((writes.role == GRAD_INPUT) & (writes.producer >= 0))
    for row in rows.tolist():
        module, maker = int(writes.call[row]), int(writes.producer[row])
        for call in (maker, int(outer[maker])):
            known = found.get(call)
            if call >= 0 and (known is None or _depth(columns, module) > _depth(columns, known)):
                found[call] = module
    return found


def _depth(columns: Columns, call: int) -> int:
    return len(columns.text(int(columns.module[call])))


def combined_hash(tensors: Tensors, calls: int) -> npt.NDArray[np.uint64]:
    """Per call one number from the hashes of its tensors in order; 0: unknown or none."""
    place = (np.arange(len(tensors.call)) - tensors.start[tensors.call]).astype(np.uint64)
    mixed = tensors.hash ^ (place * np.uint64(0x9E3779B97F4A7C15))
    mixed ^= tensors.order.astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
    mixed *= np.uint64(0xFF51AFD7ED558CCD)
    mixed ^= mixed >> np.uint64(29)
    total = np.zeros(calls, np.uint64)
    np.add.at(total, tensors.call, mixed)
    unknown = np.zeros(calls, bool)
    unknown[tensors.call[tensors.hash == 0]] = True
    unknown |= np.diff(tensors.start) == 0
    total[unknown] = 0
    return total
