"""Figures of distinct tensor contents as arrays: few are looked at once, many uses are numbers."""

from __future__ import annotations

import itertools
import math

import numpy as np

from bridge.capture.lines import Contents
from bridge.capture.record import Digest, TensorRecord
from bridge.verify.columns import Bools, Ints


class Digests:
    """Figures of distinct contents, each looked at once; uses of them are numbers.

    0: no digest; 1 and up: contents of a capture, by the number they have there; below 0: digests that
    records carry themselves.
    """

    def __init__(self) -> None:
        self.stored: list[Digest | None] = []
        self.carried: list[Digest] = []  # also keeps alive what ids name
        self._numbers: dict[int, int] = {id(None): 0}
        self._bases: dict[int, tuple[int, int, Bools]] = {}
        self._alive: list[Contents] = []

    def number(self, records: list[TensorRecord], contents: Contents | None) -> tuple[Ints, Bools]:
        """Per record the number of its content, and whether its bytes are stored."""
        if contents is None:
            return self._carried(records), np.array([record.blob is not None for record in records], bool)
        base, size, blobs = self._base_of(contents)
        raw = np.array([record.content for record in records], np.int64)
        known = (raw >= 0) & (raw < size)
        numbers, stored = np.where(known, raw + base + 1, 0), blobs[np.where(known, raw, -1)]
        rest = np.flatnonzero(raw < 0)
        if len(rest):
            others = [records[row] for row in rest.tolist()]
            numbers[rest] = self._carried(others)
            stored[rest] = [record.blob is not None for record in others]
        return numbers, stored

    def _carried(self, records: list[TensorRecord]) -> Ints:
        numbers = self._numbers
        for record in records:
            if id(record.digest) not in numbers:
                assert record.digest is not None
                self.carried.append(record.digest)
                numbers[id(record.digest)] = -len(self.carried)
        return np.array([numbers[id(record.digest)] for record in records], np.int64)

    def _base_of(self, contents: Contents) -> tuple[int, int, Bools]:
        known = self._bases.get(id(contents))
        if known is None:
            self._alive.append(contents)
            size = max([-1, *contents.digests, *contents.blobs]) + 1
            blobs = np.zeros(size + 1, bool)
            blobs[list(contents.blobs)] = True
            known = self._bases[id(contents)] = len(self.stored), size, blobs
            self.stored.extend(map(contents.digests.get, range(size)))
        return known

    def figures(self) -> Figures:
        return Figures([None, *self.stored, *reversed(self.carried)], len(self.stored))


class Figures:
    """Figures of digests as arrays, to be taken by number; see `Digests`."""

    def __init__(self, digests: list[Digest | None], stored: int) -> None:
        nan = math.nan
        none = (nan, nan, nan, nan, nan, nan, 0.0, 0.0)
        rows = itertools.chain.from_iterable(
            none
            if item is None
            else (
                item.count,
                item.sum,
                item.abs_sum,
                item.sq_sum,
                nan if item.min is None else item.min,
                nan if item.max is None else item.max,
                item.nan,
                item.pos_inf + item.neg_inf,
            )
            for item in digests
        )
        table = np.fromiter(rows, np.float64, 8 * len(digests)).reshape(-1, 8)
        table[[item is None for item in digests], 0] = 0.0
        self.table = np.ascontiguousarray(table.T)
        # 0 is no hash; one that is 0 counts as 1.
        texts = ["" if item is None else item.hash for item in digests]
        data = bytes.fromhex("".join([text.rjust(16, "0") for text in texts]))
        self.hash = np.frombuffer(data, ">u8").astype(np.uint64)
        self.hash[(self.hash == 0) & np.array([bool(text) for text in texts], bool)] = 1
        self.known = np.array([item is not None for item in digests], bool)
        self.stored = stored
