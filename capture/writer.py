"""One rank's files, written by a thread of their own while the step runs. Imports no torch.

Everything is appended, so a process killed at any moment leaves what was written. Memory waiting to be
written is bounded: `put_blob` blocks while the queue holds more than `queue_bytes`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bridge.capture.record import Call, Digest, Dropped, RankFiles
from bridge.capture.shards import BlobLine, Buffer, ShardWriter, blob_name

log = logging.getLogger("bridge.capture")

QUEUE_BYTES = 256 << 20
#: Free space that is left alone on the disk written to.
DISK_RESERVE = 64 << 20


class ContentLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of one content: a line of contents.jsonl; later lines add to earlier ones."""

    content: int
    digest: Digest | None = None
    blob: str | None = None


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """rank.json: what one rank has to say to the manifest."""

    files: RankFiles
    stored_bytes: int = 0
    dropped: tuple[Dropped, ...] = ()
    problems: tuple[str, ...] = ()


class Blob(msgspec.Struct, kw_only=True):
    """Bytes on their way to disk."""

    content: int
    key: str  #: of the call that selected it
    tensor: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    fetch: Callable[[], Buffer]  #: waits for the bytes where a device still copies them
    done: Callable[[], None]  #: gives the memory back


class RankWriter:
    """Writes calls, digests and blobs of one rank."""

    def __init__(
        self, folder: Path, *, rank: int, budget_bytes: int | None, queue_bytes: int = QUEUE_BYTES
    ) -> None:
        folder.mkdir(parents=True)
        self.rank = rank
        self.folder = folder
        self.problems: list[str] = []
        self.dropped: list[Dropped] = []
        self._budget = budget_bytes
        self._queue_bytes = queue_bytes
        self._shards = ShardWriter(folder)
        self._known: dict[str, BlobLine] = {}
        self._files = {name: _LineFile(folder / f"{name}.jsonl") for name in ("calls", "contents", "blobs")}
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._waiting = 0
        self._room = threading.Condition()
        self._full = False
        self._encoder = msgspec.json.Encoder()
        self._thread = threading.Thread(target=self._run, name="bridge-capture-writer", daemon=True)
        self._thread.start()

    def put_calls(self, calls: Sequence[Call]) -> None:
        """Queue calls; a call with an index seen before replaces the earlier one."""
        self._queue.put(("calls", calls))

    def put_contents(self, lines: Sequence[ContentLine]) -> None:
        """Queue digests."""
        self._queue.put(("contents", lines))

    def put_blob(self, blob: Blob) -> None:
        """Queue bytes; blocks while too many wait."""
        with self._room:
            while (
                self._waiting and self._waiting + blob.nbytes > self._queue_bytes and self._thread.is_alive()
            ):
                self._room.wait(timeout=1.0)
            self._waiting += blob.nbytes
        self._queue.put(("blob", blob))

    def refuses(self, nbytes: int) -> str | None:
        """Why bytes of this number are not to be copied at all; None: they are welcome."""
        if self._full:
            return "the disk is full"
        planned = self._shards.written + self._waiting + nbytes
        if self._budget is not None and planned > self._budget:
            return f"the budget of {self._budget} bytes is used up"
        return None

    def drop(self, *, key: str, tensor: str, nbytes: int, reason: str) -> None:
        """Note something selected that is not stored."""
        self.dropped.append(Dropped(key=key, tensor=tensor, bytes=nbytes, reason=reason))

    def drain(self) -> None:
        """Wait until everything queued has been written."""
        seen = threading.Event()
        self._queue.put(("mark", seen))
        while not seen.wait(timeout=1.0):
            if not self._thread.is_alive():
                return

    def close(self, *, calls: int) -> RankReport:
        """Write everything out and say what there is, `calls` calls and the sha256 of each file."""
        self._queue.put(("stop", None))
        self._thread.join()
        files = {}
        for path in sorted(self.folder.iterdir()):
            if path.name != "rank.json":
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                files[f"{self.folder.name}/{path.name}"] = digest
        report = RankReport(
            files=RankFiles(rank=self.rank, calls=calls, files=files),
            stored_bytes=self._shards.written,
            dropped=tuple(self.dropped),
            problems=tuple(self.problems),
        )
        try:
            (self.folder / "rank.json.new").write_bytes(msgspec.json.encode(report))
            (self.folder / "rank.json.new").replace(self.folder / "rank.json")
        except OSError as error:
            self.problems.append(f"rank.json could not be written: {error}")
            (self.folder / "rank.json.new").unlink(missing_ok=True)
        return msgspec.structs.replace(report, problems=tuple(self.problems))

    def _run(self) -> None:
        while True:
            kind, item = self._queue.get()
            try:
                if kind == "blob":
                    self._write_blob(item)
                elif kind == "mark":
                    item.set()
                elif kind == "stop":
                    break
                else:
                    self._files[kind].append(self._encoder.encode_lines(item))
            except Exception as error:  # the thread must go on: the step would wait for it forever
                self._problem(f"{kind} could not be written", error)
        for closing in (self._shards.close, *(file.close for file in self._files.values())):
            try:
                closing()
            except OSError as error:
                self._problem("a file could not be closed", error)

    def _write_blob(self, blob: Blob) -> None:
        try:
            reason = "the disk is full" if self._full else self._lacks_space(blob.nbytes)
            if reason is None:
                self._store(blob)
            else:
                self.drop(key=blob.key, tensor=blob.tensor, nbytes=blob.nbytes, reason=reason)
        except OSError as error:
            self._full = True
            self.drop(
                key=blob.key,
                tensor=blob.tensor,
                nbytes=blob.nbytes,
                reason=f"writing failed: {error.strerror}",
            )
            raise
        finally:
            blob.done()
            with self._room:
                self._waiting -= blob.nbytes
                self._room.notify_all()

    def _store(self, blob: Blob) -> None:
        data = blob.fetch()
        name = blob_name(data, dtype=blob.dtype, shape=blob.shape)
        if name not in self._known:
            line = self._shards.append(name, data, dtype=blob.dtype, shape=blob.shape)
            self._known[name] = line
            self._files["blobs"].append(self._encoder.encode_lines([line]))
        self._files["contents"].append(
            self._encoder.encode_lines([ContentLine(content=blob.content, blob=name)])
        )

    def _lacks_space(self, nbytes: int) -> str | None:
        free = shutil.disk_usage(self.folder).free
        if free - nbytes < DISK_RESERVE:
            return f"the disk has {free} bytes free, and {DISK_RESERVE} are left alone"
        return None

    def _problem(self, what: str, error: Exception) -> None:
        text = f"{what}: {type(error).__name__}: {error}"
        if text not in self.problems:
            self.problems.append(text)
            log.warning("capture: %s", text)


class _LineFile:
    """A file of JSON lines; a write that fails leaves no half line behind."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        self._end = 0

    def append(self, data: bytes) -> None:
        view, at = memoryview(data), self._end
        try:
            while view:
                done = os.pwrite(self._descriptor, view, at)
                view, at = view[done:], at + done
        except OSError:
            os.ftruncate(self._descriptor, self._end)
            raise
        self._end = at

    def close(self) -> None:
        os.close(self._descriptor)
