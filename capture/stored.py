"""The calls of a whole capture, decoded when looked at: a hundred thousand of them are never held at once.

`walk` reads every call once, in batches that stay in the processor's caches; afterwards single calls are
decoded from the file's bytes, which are kept. Imports no torch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import overload

import msgspec
import numpy as np
import numpy.typing as npt

from bridge.capture.lines import (
    ContentLine,
    Contents,
    bad_line,
    check_files,
    check_rank,
    checked_bytes,
    read_lines,
)
from bridge.capture.record import Call, RankFiles
from bridge.capture.store import Capture
from bridge.errors import CorruptCaptureError

Ints = npt.NDArray[np.int64]

#: Called with calls in the order of the file, their digests not filled in, and the contents they name.
Visit = Callable[[list[Call], Contents], None]

#: Bytes of lines that are decoded together: the objects made of them stay in a second-level cache.
BATCH = 1 << 20
#: Decoded calls that are kept, so that a second look costs nothing.
KEPT = 4096


def stored_calls(capture: Capture) -> Sequence[Call]:
    """All calls of a capture, as `Capture.calls`; of a whole one they are decoded when looked at."""
    ranks = capture.rank_folders
    if not capture.manifest.complete or any(listed is None for _, listed in ranks.values()):
        return capture.calls
    return StoredCalls({rank: (folder, listed) for rank, (folder, listed) in ranks.items() if listed})


class StoredCalls(Sequence[Call]):
    """Calls by rank, then step, then order of execution.

    Args:
        ranks: Folder of each rank and what the manifest says of it.
    """

    def __init__(self, ranks: Mapping[int, tuple[Path, RankFiles]]) -> None:
        self._ranks = [_RankLines(rank, *where) for rank, where in ranks.items()]
        self._decoder = msgspec.json.Decoder(Call)
        self._kept: dict[int, Call] = {}
        self._order: Ints | None = None  #: per call its place in the order of the files
        self._first: list[int] = []  #: place of each rank's first line in that order

    def walk(self, visit: Visit | None = None) -> Ints:
        """Hand all lines over in batches; return which of them, in which order, are the calls.

        Whoever visits looks at every layout and checks the new ones (`Contents.check`).

        Raises:
            CorruptCaptureError: a line that is not a record, or contradicts the others or the manifest.
        """
        found: list[Ints] = []
        self._first = []
        total = 0
        collecting = gc.isenabled()
        gc.disable()
        try:
            for rank in self._ranks:
                self._first.append(total)
                order = rank.walk(self._decoder, visit)
                found.append(order + total)
                total += len(rank.starts) - 1
        finally:
            if collecting:
                gc.enable()
        self._order = np.concatenate(found) if found else np.zeros(0, np.int64)
        return self._order

    def __len__(self) -> int:
        return len(self._places())

    @overload
    def __getitem__(self, at: int) -> Call: ...
    @overload
    def __getitem__(self, at: slice) -> list[Call]: ...
    def __getitem__(self, at: int | slice) -> Call | list[Call]:
        if isinstance(at, slice):
            return [self[place] for place in range(*at.indices(len(self)))]
        line = int(self._places()[at])
        call = self._kept.get(line)
        if call is None:
            number = int(np.searchsorted(self._first, line, side="right")) - 1
            call = self._ranks[number].call(line - self._first[number], self._decoder)
            if len(self._kept) >= KEPT:
                self._kept.clear()
            self._kept[line] = call
        return call

    def __iter__(self) -> Iterator[Call]:
        for at in range(len(self)):
            yield self[at]

    def _places(self) -> Ints:
        return self.walk() if self._order is None else self._order


class _RankLines:
    """The bytes of one rank's calls.jsonl, where its lines begin, and its contents."""

    def __init__(self, rank: int, folder: Path, listed: RankFiles) -> None:
        self.rank, self.path, self.listed = rank, folder / "calls.jsonl", listed
        check_files(folder, listed)
        self.data = checked_bytes(self.path, listed)
        self.contents = Contents(read_lines(folder / "contents.jsonl", ContentLine, [], listed), folder)
        ends = np.flatnonzero(np.frombuffer(self.data, np.uint8) == ord("\n")).astype(np.int64) + 1
        if not self.data.endswith(b"\n") and self.data:
            ends = np.append(ends, len(self.data))
        self.starts: Ints = np.concatenate([[0], ends])

    def walk(self, decoder: msgspec.json.Decoder[Call], visit: Visit | None) -> Ints:
        """Hand all lines over; return the lines that count, in order of execution."""
        view, count = memoryview(self.data), len(self.starts) - 1
        index, step = np.zeros(count, np.int64), np.zeros(count, np.int64)
        first = 0
        while first < count:
            after = int(np.searchsorted(self.starts, self.starts[first] + BATCH, side="right")) - 1
            after = min(max(after, first + 1), count)
            try:
                calls = decoder.decode_lines(view[self.starts[first] : self.starts[after]])
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
                raise bad_line(self.data, decoder, self.path) from None
            if len(calls) != after - first:
                raise CorruptCaptureError(f"{self.path} has empty lines; capture again")
            check_rank(calls, self.path, self.rank)
            if visit is None:
                self.contents.check(calls)
            for call in calls:
                if call.kind == "launch" and call.mutated:
                    self.contents.join(call)  # leaves out what the launch did not change
            index[first:after] = [call.index for call in calls]
            step[first:after] = [call.step for call in calls]
            if visit is not None:
                visit(calls, self.contents)
            first = after
        # A module call is written when it returns, and again with its gradients: the later line counts.
        order: Ints = np.lexsort((index, step))
        last = np.append((np.diff(index[order]) != 0) | (np.diff(step[order]) != 0), True)[:count]
        order = order[last]
        if len(order) != self.listed.calls:
            raise CorruptCaptureError(
                f"{self.path} has {len(order)} calls, the manifest says {self.listed.calls}; capture again"
            )
        return order

    def call(self, line: int, decoder: msgspec.json.Decoder[Call]) -> Call:
        call = decoder.decode(memoryview(self.data)[self.starts[line] : self.starts[line + 1]])
        self.contents.check([call])
        self.contents.join(call)
        return call
