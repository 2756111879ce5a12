"""Calls become columns, a batch at a time: one pass over the records while they are in the caches."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from bridge.capture.layout import memory_order
from bridge.capture.lines import Contents, is_sane, repeats
from bridge.capture.record import Call, TensorRecord
from bridge.capture.stored import StoredCalls
from bridge.verify.columns import (
    GRAD_INPUT,
    GRAD_OUTPUT,
    INPUT,
    KINDS,
    OUTPUT,
    PARAM,
    PHASES,
    Bools,
    Columns,
    Floats,
    Ints,
    Numbers,
    Pool,
    Tensors,
    is_empty,
    reads_of,
    short_op,
    writes_of,
)
from bridge.verify.contents import Digests, Figures

#: Ops that write their first argument without reading it.
_OVERWRITES = frozenset(
    """copy_ fill_ zero_ uniform_ normal_ bernoulli_ exponential_ random_ set_ resize_ _allgather_base_
    all_gather_copy_in""".split()
)
_PLAIN = (
    "rank",
    "step",
    "microbatch",
    "index",
    "key",
    "op",
    "kind",
    "phase",
    "module",
    "module_class",
    "source",
    "told",
    "parent",
)
_KIND = {name: number for number, name in enumerate(KINDS)}
_PHASE = {name: number for number, name in enumerate(PHASES)}


def columns(calls: Sequence[Call], pool: Pool) -> Columns:
    """Turn calls into columns; `pool` is shared by the two runs that are to be compared."""
    rows = _Rows(pool)
    # Millions of short-lived objects and no cycles: the collector would cost more than the work.
    collecting = gc.isenabled()
    gc.disable()
    try:
        if isinstance(calls, StoredCalls):
            order = calls.walk(rows.add)
        else:
            rows.add(calls, None)
            order = np.arange(len(calls))
        return rows.columns(calls, order)
    finally:
        if collecting:
            gc.enable()


class _Rows:
    """What has been gathered of calls so far, in the order in which they came."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.parts: dict[str, list[Ints]] = {}
        self.reads, self.writes = _Uses(), _Uses()
        self.digests = Digests()

    def add(self, calls: Sequence[Call], contents: Contents | None) -> None:
        """Append calls; `contents` holds the digests of those that do not carry their own."""
        pool = self.pool
        modules = [call for call in calls if call.kind == "module"]
        found: dict[str, Ints | list[int]] = {
            "key": pool.numbers([call.key for call in calls]),
            "op": pool.numbers([call.op for call in calls]),
            "module": pool.numbers([call.module for call in calls]),
            "module_class": pool.numbers([call.module_class for call in calls]),
            "source": pool.numbers([call.source for call in calls]),
            "told": pool.numbers([_told(call) if call.attrs or call.flags else None for call in calls]),
            "phase": [_PHASE[call.phase] for call in calls],
            "kind": [_KIND[call.kind] for call in calls],
            "rank": [call.rank for call in calls],
            "step": [call.step for call in calls],
            "microbatch": [call.microbatch for call in calls],
            "index": [call.index for call in calls],
            "parent": [-1 if call.parent is None else call.parent for call in calls],
        }
        for name, values in found.items():
            self.parts.setdefault(name, []).append(np.array(values, np.int64))
        read_roles = [
            role
            for call in modules
            for role, part in (
                (INPUT, call.inputs),
                (PARAM, call.params),
                (GRAD_OUTPUT, call.grad_outputs),
            )
            for _ in part
        ]
        write_roles = [
            role
            for call in modules
            for role, part in ((OUTPUT, call.outputs), (GRAD_INPUT, call.grad_inputs))
            for _ in part
        ]
        if modules:
            reads, writes = [reads_of(call) for call in calls], [writes_of(call) for call in calls]
        else:
            reads, writes = [call.inputs for call in calls], [call.outputs for call in calls]
        sane = self.reads.add(calls, reads, read_roles, self.digests, contents)
        sane &= self.writes.add(calls, writes, write_roles, self.digests, contents)
        if contents is not None and not sane:
            contents.check(calls)

    def columns(self, calls: Sequence[Call], order: Ints) -> Columns:
        """All that was gathered, the calls in this order."""
        none = np.zeros(0, np.int64)
        plain = {name: np.concatenate(parts)[order] for name, parts in self.parts.items()}
        fields = {name: plain.get(name, none) for name in _PLAIN}
        fields["source"][fields["source"] == self.pool.number(None)] = -1
        items = self.pool.items()
        ops = {number: short_op(str(items[number])) for number in np.unique(fields["op"]).tolist()}
        overwrites = _marked(fields["op"], [number for number, name in ops.items() if name in _OVERWRITES])
        unwritten = _marked(fields["op"], [number for number, name in ops.items() if is_empty(name)])
        figures = self.digests.figures()
        place = fields["rank"], fields["step"], fields["index"]
        reads = self.reads.tensors(order, overwrites, INPUT, fields["kind"], place, self.pool, figures)
        writes = self.writes.tensors(order, unwritten, OUTPUT, fields["kind"], place, self.pool, figures)
        first = writes.start[:-1]
        has = np.diff(writes.start) > 0
        has[has] = writes.role[first[has]] == OUTPUT
        first_shape = np.full(len(order), -1, np.int64)
        first_shape[has] = writes.shape[first[has]]
        outputs = writes.role == OUTPUT
        return Columns(
            calls=calls,
            pool=self.pool,
            shapes=_sequences(writes, (writes.shape,), outputs, self.pool),
            signature=_sequences(writes, (writes.shape, writes.dtype), outputs, self.pool),
            input_shapes=_sequences(reads, (reads.shape,), reads.role == INPUT, self.pool),
            first_shape=first_shape,
            reads=reads,
            writes=writes,
            **fields,
        )


def _sequences(tensors: Tensors, values: tuple[Ints, ...], chosen: Bools, pool: Pool) -> Ints:
    """Per call a pool number for the values of its chosen tensors in order, as tuples of pool numbers."""
    rows = np.flatnonzero(chosen)
    call = tensors.call[rows]
    counts = np.bincount(call, minlength=len(tensors.start) - 1)
    start = np.cumsum(counts) - counts
    # One number for what precedes, then the next tensor's: calls of one number so far go on together.
    number, open_calls = counts.copy(), np.flatnonzero(counts)
    for place in range(int(counts.max(initial=0))):
        open_calls = open_calls[counts[open_calls] > place]
        for value in values:
            next_value = value[rows[start[open_calls] + place]]
            key = number[open_calls] * (int(next_value.max()) + 1) + next_value
            number[open_calls] = np.unique(key, return_inverse=True)[1].reshape(-1)
    keys = counts * (int(number.max(initial=0)) + 1) + number
    _, first, same = np.unique(keys, return_index=True, return_inverse=True)
    known = []
    for at in first.tolist():
        own = rows[start[at] : start[at] + counts[at]]
        known.append(pool.number(tuple(tuple(value[own].tolist()) for value in values)))
    return np.array(known, np.int64)[same.reshape(-1)] if len(counts) else counts


def _told(call: Call) -> bytes:
    """What a call was told to do, as one hashable thing; equal ones are told the same."""
    try:
        return msgspec.msgpack.encode((call.attrs, call.flags), order="deterministic", enc_hook=repr)
    except (OverflowError, TypeError):  # numbers beyond 64 bits, keys that are no strings
        return repr((call.attrs, call.flags)).encode()


def _marked(values: Ints, wanted: list[int]) -> Bools:
    return np.isin(values, wanted)


class _Uses:
    """One row per tensor that the gathered calls read, or write."""

    def __init__(self) -> None:
        self.counts: list[Ints] = []
        self.layout: list[Ints] = []
        self.content: list[Ints] = []
        self.stored: list[Bools] = []
        self.producer: list[Ints] = []
        self.role: list[Ints] = []  #: -1: the default
        self.free: list[Bools] = []  #: memory that the call was given to write to
        self.filled: list[Bools] = []  #: arguments that the call writes
        self._layouts = Numbers()  #: of (dtype, shape, stride)

    def add(
        self,
        calls: Sequence[Call],
        lists: Sequence[tuple[TensorRecord, ...]],
        module_roles: list[int],
        digests: Digests,
        contents: Contents | None,
    ) -> bool:
        """Append the tensors of calls; False when one has a layout that no tensor can have."""
        seen = len(self._layouts)
        flat = [record for records in lists for record in records]
        counts = np.array([len(records) for records in lists], np.int64)
        layouts = [(record.dtype, record.shape, record.stride) for record in flat]
        content, stored = digests.number(flat, contents)
        self.counts.append(counts)
        self.layout.append(np.fromiter(map(self._layouts.__getitem__, layouts), np.int64, len(flat)))
        self.content.append(content)
        self.stored.append(stored)
        self.producer.append(
            np.array([-1 if record.producer is None else record.producer for record in flat], np.int64)
        )
        role = np.full(len(flat), -1, np.int64)
        if module_roles:
            role[np.repeat([call.kind == "module" for call in calls], counts)] = module_roles
        self.role.append(role)
        free = np.array([record.name == "out" for record in flat], bool)
        start = np.cumsum(counts) - counts
        filled = np.zeros(len(flat), bool)
        for at, call in enumerate(calls):
            if not call.mutated:
                continue
            for place, record in enumerate(lists[at], start=int(start[at])):
                filled[place] = record.name in call.mutated
                # Outputs that a launch was given memory for, which nothing has written before.
                free[place] |= filled[place] and call.kind == "launch" and record.producer is None
        self.free.append(free)
        self.filled.append(filled)
        new = itertools.islice(self._layouts, seen, None)
        return all(is_sane(shape, stride) for _, shape, stride in new)

    def tensors(
        self,
        order: Ints,
        first_is_void: Bools,
        default_role: int,
        kind: Ints,
        place: tuple[Ints, Ints, Ints],
        pool: Pool,
        figures: Figures,
    ) -> Tensors:
        """The rows of the calls in this order. `place`: rank, step and index of each call."""
        came = _joined(self.counts, np.int64)
        counts = came[order]
        start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        call = np.repeat(np.arange(len(order)), counts)
        within = np.arange(len(call)) - start[call]
        row = (np.cumsum(came) - came)[order][call] + within
        layout, content = _joined(self.layout, np.int64)[row], _joined(self.content, np.int64)[row]
        digest = np.where(content >= 0, content, content + len(figures.hash))
        layouts = list(self._layouts)

        def facts(values: Iterable[Any], kind: Any = np.int64) -> Any:
            return np.array(list(values), kind)[layout] if len(row) else np.zeros(0, kind)

        times = facts((repeats(shape, stride) for _, shape, stride in layouts), np.float64)
        times = np.where((content > 0) & (content <= figures.stored), times, 1.0)

        def figure(number: int) -> Floats:
            return np.asarray(figures.table[number][digest])

        nan = figure(6) * times
        role = _joined(self.role, np.int64)[row]
        return Tensors(
            start=start,
            call=call,
            role=np.where(role < 0, default_role, role),
            dtype=facts(pool.number(dtype) for dtype, _, _ in layouts),
            shape=facts(pool.number(shape) for _, shape, _ in layouts),
            numel=facts((math.prod(shape) for _, shape, _ in layouts), np.float64),
            count=figure(0) * times,
            sum=figure(1) * times,
            abs_sum=figure(2) * times,
            sq_sum=figure(3) * times,
            min=figure(4),
            max=figure(5),
            nan=nan.astype(np.int64),
            nonfinite=(nan + figure(7) * times).astype(np.int64),
            hash=figures.hash[digest],
            order=facts(_order(shape, stride, pool) for _, shape, stride in layouts),
            known=figures.known[digest],
            producer=_positions(_joined(self.producer, np.int64)[row], call, *place),
            stored=_joined(self.stored, bool)[row],
            void=(first_is_void[call] & (within == 0))
            | _joined(self.free, bool)[row]
            | (_joined(self.filled, bool)[row] & ~figures.known[digest]),
        )


def _joined(parts: list[Any], kind: Any) -> Any:
    return np.concatenate(parts) if parts else np.zeros(0, kind)


def _order(shape: tuple[int, ...], stride: tuple[int, ...], pool: Pool) -> int:
    return pool.number(("order", memory_order(shape, stride) if len(shape) == len(stride) else ()))


def _positions(producers: Ints, call: Ints, rank: Ints, step: Ints, index: Ints) -> Ints:
    """Position of the call with each producer's index in the same rank and step; -1: none."""
    if not len(producers):
        return producers
    width = int(max(index.max(), producers.max())) + 2
    place = (rank * (int(step.max()) + 1) + step) * width
    order = np.argsort(place + index, kind="stable")
    sought = place[call] + producers
    found = np.minimum(np.searchsorted((place + index)[order], sought), len(order) - 1)
    position = order[found]
    return np.where((producers >= 0) & ((place + index)[position] == sought), position, -1)
