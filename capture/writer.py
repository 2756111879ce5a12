"""One rank's files, written by threads of their own while the step runs. Imports no torch.

Everything is appended, so a process killed at any moment leaves what was written. Memory waiting to be
written is bounded: `put_blob` blocks while all chunks are in use.
"""

from __future__ import annotations

import logging
import queue
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bridge.capture import workers
from bridge.capture.linefile import LineFile
from bridge.capture.lines import ContentLine
from bridge.capture.loads import ALIGNMENT, MOST_PIECES, Blob, Lane, Load, Stream
from bridge.capture.pool import Chunk, ChunkPool
from bridge.capture.record import DISK_FULL, Call, Digest, Dropped, RankFiles, ShardFile
from bridge.capture.request import size
from bridge.capture.shards import BlobLine
from bridge.capture.workers import Workers, thread_count
from bridge.errors import no_space

log = logging.getLogger("bridge.capture")

#: A load that nobody waits to write is handed over when it has this many bytes.
_EAGER_BYTES = 256 << 10
#: Before a tensor of this size is copied the disk is looked at; of smaller ones, when they are written.
_LOOK_BYTES = 64 << 10


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """rank.json: what one rank has to say to the manifest."""

    files: RankFiles
    stored_bytes: int = 0
    forecast_bytes: int | None = None
    dropped: tuple[Dropped, ...] = ()
    problems: tuple[str, ...] = ()
    problem_codes: dict[str, str] = {}  #: problem -> what it comes from, where a program acts on that


class RankWriter:
    """Writes calls, digests and blobs of one rank."""

    def __init__(self, folder: Path, *, rank: int, budget_bytes: int | None) -> None:
        folder.mkdir(parents=True)
        self.rank = rank
        self.folder = folder
        self.problems: list[str] = []
        self.problem_codes: dict[str, str] = {}
        self.dropped: list[Dropped] = []
        self._budget = budget_bytes
        self.forecast_bytes: int | None = None
        self._accepted = 0  #: bytes of blobs taken, without those that turned out to be there already
        self._lock = threading.Lock()
        self._files = {name: LineFile(folder / f"{name}.jsonl") for name in ("calls", "contents", "blobs")}
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._encoder = msgspec.json.Encoder()
        self._lanes: dict[str, Lane] = {}
        self._open: dict[str, Load] = {}
        self._workers = Workers(folder, self)
        self._thread = threading.Thread(target=self._run, name="bridge-capture-lines", daemon=True)
        self._thread.start()

    def put_calls(self, calls: Sequence[Call]) -> None:
        """Queue calls; a call with an index seen before replaces the earlier one."""
        self._queue.put(("calls", calls))
        self._hand_over()

    def put_contents(self, lines: Sequence[ContentLine]) -> None:
        """Queue digests."""
        self._queue.put(("contents", lines))

    def lane(self, device: str, make: Callable[[], Lane]) -> Lane:
        """The lane for contents of a device; made once."""
        found = self._lanes.get(device)
        if found is None:
            found = self._lanes[device] = make()
            self._workers.allow(thread_count(device=device != "cpu"))
        return found

    def put_blob(self, blob: Blob, device: str, source: Any) -> None:
        """Copy a blob from memory and queue it; blocks while too much waits.

        Args:
            blob: What it is.
            device: Whose lane copies it.
            source: What the lane copies from.
        """
        with self._lock:
            self._accepted += blob.nbytes
        if blob.nbytes > self._lanes[device].pool.chunk_bytes:
            self._stream(blob, device, source)
        else:
            self._pack(blob, device, source)

    def refuses(self, nbytes: int) -> str | None:
        """Why bytes of this number are not to be copied at all; None: they are welcome."""
        if self._workers.full:
            return "the disk is full"
        if self._budget is not None and self._accepted + nbytes > self._budget:
            return f"the budget of {self._budget} bytes is used up"
        if nbytes >= _LOOK_BYTES and nbytes > self._disk_room():
            free = shutil.disk_usage(self.folder).free
            return f"the disk has {free} bytes free, and {workers.DISK_RESERVE} are left alone"
        return None

    def foresee(self, nbytes: int) -> None:
        """The step is expected to store so much: say so now if it cannot be kept."""
        self.forecast_bytes = nbytes
        room = self._accepted + self._disk_room()
        limit = "the disk has room for"
        if self._budget is not None and self._budget < room:
            room, limit = self._budget, "the budget is"
        if nbytes > room:
            log.warning(
                "capture: the tensors of this step are expected to take about %s, %s %s: what comes after "
                "that is dropped, and listed",
                size(nbytes),
                limit,
                size(max(room, 0)),
            )

    def drop(self, *, key: str, tensor: str, nbytes: int, reason: str) -> None:
        """Note something selected that is not stored."""
        self.dropped.append(Dropped(key=key, tensor=tensor, bytes=nbytes, reason=reason))

    def drain(self) -> None:
        """Wait until everything queued has been written."""
        self._hand_over()
        self._workers.finish()
        seen = threading.Event()
        self._queue.put(("mark", seen))
        while not seen.wait(timeout=1.0):
            if not self._thread.is_alive():
                return

    def close(self, *, calls: int) -> RankReport:
        """Write everything out and say what there is, `calls` calls and the sha256 of each file."""
        self._hand_over()
        shards = self._workers.close()
        self._queue.put(("stop", None))
        self._thread.join()
        files = {}
        for file in self._files.values():
            try:
                files[f"{self.folder.name}/{file.path.name}"] = file.close()
            except OSError as error:
                self.failed("a file could not be closed", error)
        report = RankReport(
            files=RankFiles(rank=self.rank, calls=calls, files=files, shards=self._placed(shards)),
            stored_bytes=self._workers.written,
            forecast_bytes=self.forecast_bytes,
            dropped=tuple(self.dropped),
            problems=tuple(self.problems),
            problem_codes=self.problem_codes,
        )
        try:
            (self.folder / "rank.json.new").write_bytes(msgspec.json.encode(report))
            (self.folder / "rank.json.new").replace(self.folder / "rank.json")
        except OSError as error:
            self.failed("rank.json could not be written", error)
            (self.folder / "rank.json.new").unlink(missing_ok=True)
        return msgspec.structs.replace(report, problems=tuple(self.problems))

    def stored(
        self,
        lines: Sequence[BlobLine],
        contents: Sequence[tuple[Blob, str]],
        digests: Sequence[tuple[Blob, Digest]] = (),
    ) -> None:
        """Blobs were written; these, and others with the same bytes, now have a name, these a digest."""
        with self._lock:
            taken = sum(blob.nbytes for blob, _ in contents)
            self._accepted -= taken - sum(line.nbytes for line in lines)
        # The blobs first: a killed process leaves no content whose blob is nowhere.
        placed = not lines or self._append("blobs", lines)
        found = [ContentLine(content=blob.content, digest=digest) for blob, digest in digests]
        if placed:
            found += [ContentLine(content=blob.content, blob=name) for blob, name in contents]
        if found:
            self._append("contents", found)

    def lost(self, blob: Blob, reason: str) -> None:
        """A blob was not written."""
        with self._lock:
            self._accepted -= blob.nbytes
        self.drop(key=blob.key, tensor=blob.tensor, nbytes=blob.nbytes, reason=reason)

    def failed(self, what: str, error: Exception) -> None:
        """Note a problem once."""
        text = f"{what}: {type(error).__name__}: {error}"
        if no_space(error):
            self.problem_codes[text] = DISK_FULL
        if text not in self.problems:
            self.problems.append(text)
            log.warning("capture: %s", text)

    def _pack(self, blob: Blob, device: str, source: Any) -> None:
        lane, load = self._lanes[device], self._open.get(device)
        if load is not None:
            begin = -(-load.used // ALIGNMENT) * ALIGNMENT
            fits = begin + blob.nbytes <= lane.pool.chunk_bytes and len(load.pieces) < MOST_PIECES
            if fits and lane.takes(load):
                load.used = begin
            else:
                self._submit(device)
                load = None
        if load is None:
            load = self._open[device] = Load(self._chunk(lane.pool), lane.pool)
        begin = load.used
        lane.copy(source, 0, blob.nbytes, load)
        load.used = begin + blob.nbytes
        load.pieces.append((blob, begin, blob.nbytes))
        if load.used >= _EAGER_BYTES and self._workers.idle:
            self._submit(device)

    def _stream(self, blob: Blob, device: str, source: Any) -> None:
        lane = self._lanes[device]
        stream = Stream(blob)
        self._hand_over()
        self._workers.put(stream)
        try:
            for begin in range(0, blob.nbytes, lane.pool.chunk_bytes):
                count = min(lane.pool.chunk_bytes, blob.nbytes - begin)
                load = Load(self._chunk(lane.pool, helping=False), lane.pool)
                lane.copy(source, begin, count, load)
                load.pieces.append((blob, 0, count))
                load.used = count
                lane.seal(load)
                stream.parts.put(load)
        finally:
            stream.parts.put(None)

    def _hand_over(self) -> None:
        for device in list(self._open):
            self._submit(device)

    def _submit(self, device: str) -> None:
        load = self._open.pop(device)
        if load.pieces:
            self._lanes[device].seal(load)
            self._workers.put(load)
        else:
            load.release()

    def _chunk(self, pool: ChunkPool, *, helping: bool = True) -> Chunk:
        while (chunk := pool.take()) is None:
            self._hand_over()
            if not self._workers.alive:
                raise RuntimeError("the threads that write a capture have ended")
            if not helping or not self._workers.help():
                pool.wait(1.0)
        return chunk

    def _disk_room(self) -> int:
        """Bytes that the disk has for more, besides those that wait to be written."""
        waiting = self._accepted - self._workers.written
        return shutil.disk_usage(self.folder).free - waiting - workers.DISK_RESERVE

    def _placed(self, shards: dict[str, ShardFile]) -> dict[str, ShardFile]:
        return {f"{self.folder.name}/{name}": shard for name, shard in shards.items()}

    def _run(self) -> None:
        while True:
            kind, item = self._queue.get()
            try:
                if kind == "mark":
                    item.set()
                elif kind == "stop":
                    return
                else:
                    self._append(kind, item)
            except Exception as error:  # the thread must go on: the step would wait for it forever
                self.failed(f"{kind} could not be written", error)

    def _append(self, name: str, records: Sequence[Any]) -> bool:
        try:
            self._files[name].append(self._encoder.encode_lines(records))
        except OSError as error:
            self.failed(f"{name} could not be written", error)
            return False
        return True
