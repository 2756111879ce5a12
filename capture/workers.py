"""Threads that name blobs and write them, each into shards of its own. Imports no torch.

One thread hashes and writes some gigabytes a second, and the kernel lets one thread at a time write into
a file. So where there are processors to spare there are several, and each has its own shard.
"""

from __future__ import annotations

import itertools
import os
import queue
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from bridge.capture import digest_host
from bridge.capture.loads import Blob, Job, Load, Stream
from bridge.capture.record import Digest, ShardFile
from bridge.capture.shards import BlobLine, Named, ShardWriter, blob_name, name_state

#: Free space that is left alone on the disk written to.
DISK_RESERVE = 64 << 20
_MOST_THREADS = 16


class Ledger(Protocol):
    """Told what became of each blob."""

    def stored(
        self,
        lines: Sequence[BlobLine],
        contents: Sequence[tuple[Blob, str]],
        digests: Sequence[tuple[Blob, Digest]] = (),
    ) -> None:
        """Blobs were written; these, and others with the same bytes, now have a name, these a digest."""

    def lost(self, blob: Blob, reason: str) -> None:
        """A blob was not written."""

    def failed(self, what: str, error: Exception) -> None:
        """Something went wrong."""


def thread_count(*, device: bool) -> int:
    """How many threads may write for this rank, whose step runs on a device or on the processors.

    Other ranks of this host have their share of the processors; a step that runs on them keeps half of
    this rank's, and one that runs on a device keeps two.
    """
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    own = len(os.sched_getaffinity(0)) // max(int(ranks) if ranks.isdigit() else 1, 1)
    return max(min(own - 2 if device else own // 2, _MOST_THREADS), 1)


class Workers:
    """Takes jobs until it is closed; a thread is started when those there are have enough to do."""

    def __init__(self, folder: Path, ledger: Ledger, *, threads: int = 1) -> None:
        self._folder = folder
        self._ledger = ledger
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._unfinished = 0
        self._numbers = itertools.count()
        #: Names written, or with the contents that wait for whoever is writing that blob.
        self._names: dict[str, list[Blob] | None] = {}
        self._lock = threading.Lock()
        self.full = False
        self._own = ShardWriter(folder, numbers=self._numbers)  # of whoever waits in `finish`
        self._writers = [self._own]
        self._threads: list[threading.Thread] = []
        self._most = threads

    def allow(self, threads: int) -> None:
        """So many threads may be started."""
        self._most = max(self._most, threads)

    def put(self, job: Job) -> None:
        """Queue a job."""
        with self._idle:
            self._unfinished += 1
            busy = self._unfinished > len(self._threads)
        self._jobs.put(job)
        if busy and len(self._threads) < self._most:
            self._start()

    @property
    def idle(self) -> bool:
        """Nothing waits that no thread has begun."""
        return self._jobs.empty()

    @property
    def alive(self) -> bool:
        """Whether what is queued will be written."""
        return not self._threads or any(thread.is_alive() for thread in self._threads)

    def help(self) -> bool:
        """Do one job in the calling thread, which must not be in the middle of making a stream."""
        try:
            job = self._jobs.get_nowait()
        except queue.Empty:
            return False
        if job is not None:
            self._do(job, self._own)
        return job is not None

    def finish(self) -> None:
        """Return when everything queued was dealt with; the caller helps."""
        while self.help():
            pass
        with self._idle:
            while self._unfinished and self.alive:
                self._idle.wait(1.0)

    def close(self) -> dict[str, ShardFile]:
        """Finish, and close the shards: what they are, by name."""
        self.finish()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        closed: dict[str, ShardFile] = {}
        for writer in self._writers:
            try:
                writer.close()
            except OSError as error:
                self._ledger.failed("a shard could not be closed", error)
            closed.update(writer.closed)
        return dict(sorted(closed.items()))

    @property
    def written(self) -> int:
        """Bytes of blobs on disk."""
        return sum(writer.written for writer in self._writers)

    def _start(self) -> None:
        writer = ShardWriter(self._folder, numbers=self._numbers)
        name = f"bridge-capture-blobs-{len(self._threads)}"
        thread = threading.Thread(target=self._run, args=(writer,), name=name, daemon=True)
        self._writers.append(writer)
        self._threads.append(thread)
        thread.start()

    def _run(self, writer: ShardWriter) -> None:
        while (job := self._jobs.get()) is not None:
            self._do(job, writer)

    def _do(self, job: Job, writer: ShardWriter) -> None:
        try:
            if isinstance(job, Load):
                self._write_load(job, writer)
            else:
                self._write_stream(job, writer)
        except Exception as error:  # the thread must go on: the step would wait for it forever
            self._ledger.failed("blob could not be written", error)
        finally:
            with self._idle:
                self._unfinished -= 1
                self._idle.notify_all()

    def _write_load(self, load: Load, writer: ShardWriter) -> None:
        try:
            self._write_pieces(load, writer)
        finally:
            load.release()

    def _write_pieces(self, load: Load, writer: ShardWriter) -> None:
        blobs = [blob for blob, _, _ in load.pieces]
        parts = self._arrived(load, blobs)
        digests = _digests(load)
        if self._refused(blobs, load.used):
            self._ledger.stored((), (), digests)
            return
        mine: list[tuple[Blob, Named]] = []
        known: list[tuple[Blob, str]] = []
        for blob, data in zip(blobs, parts, strict=True):
            name = blob_name(data, dtype=blob.dtype, shape=blob.shape)
            if self._claim(name, blob, known):
                mine.append((blob, Named(name, blob.dtype, blob.shape, data)))
        lines, error = writer.append([named for _, named in mine])
        for line, (blob, _) in zip(lines, mine, strict=False):
            known += self._settle(line.blob, blob)
        self._ledger.stored(lines, known, digests)
        if error is not None:
            self._give_up([(named.name, blob) for blob, named in mine[len(lines) :]], error)

    def _write_stream(self, stream: Stream, writer: ShardWriter) -> None:
        blob = stream.blob
        known: list[tuple[Blob, str]] = []
        try:
            if self._refused([blob], blob.nbytes):
                return
            try:
                writer.begin(blob.dtype, blob.shape, blob.nbytes)
                name = self._name_and_write(stream, writer)
            except OSError as error:
                writer.abandon()
                self._give_up([("", blob)], error)
                return
        finally:
            # Whoever makes the parts waits for the chunks that they lie in.
            while (load := stream.next()) is not None:
                load.release()
        if name is None:
            writer.abandon()
            self._ledger.lost(blob, "it could not be copied from memory")
        elif self._claim(name, blob, known):
            line = writer.end(name, blob.dtype, blob.shape)
            self._ledger.stored([line], self._settle(name, blob))
        else:
            writer.abandon()
            self._ledger.stored([], known)

    def _name_and_write(self, stream: Stream, writer: ShardWriter) -> str | None:
        """Write a stream's parts and name it; None when it ended too early."""
        state, seen = name_state(stream.blob.dtype, stream.blob.shape), 0
        while (load := stream.next()) is not None:
            try:
                (data,) = self._arrived(load, [stream.blob])
                # A part at once: each call gives the interpreter's lock away and has to get it back.
                state.update(data)
                writer.extend(data)
                seen += len(data)
            finally:
                load.release()
        return state.hexdigest() if seen == stream.blob.nbytes else None

    def _arrived(self, load: Load, blobs: Sequence[Blob]) -> list[memoryview]:
        try:
            return load.bytes()
        except Exception:
            for blob in blobs:
                self._ledger.lost(blob, "it could not be copied from memory")
            raise

    def _claim(self, name: str, blob: Blob, known: list[tuple[Blob, str]]) -> bool:
        """True: the caller writes this blob. Else it is written, or somebody else is writing it."""
        with self._lock:
            if name not in self._names:
                self._names[name] = []
                return True
            waiting = self._names[name]
            if waiting is None:
                known.append((blob, name))
            else:
                waiting.append(blob)
        return False

    def _settle(self, name: str, blob: Blob) -> list[tuple[Blob, str]]:
        with self._lock:
            waiting = self._names[name] or []
            self._names[name] = None
        return [(other, name) for other in (blob, *waiting)]

    def _give_up(self, lost: Sequence[tuple[str, Blob]], error: OSError) -> None:
        """Note blobs, claimed by these names, that could not be written; nothing more will be."""
        self.full = True
        reason = f"writing failed: {error.strerror}"
        for name, blob in lost:
            with self._lock:
                waiting = self._names.pop(name, None) or []
            for other in (blob, *waiting):
                self._ledger.lost(other, reason)
        self._ledger.failed("blob could not be written", error)

    def _refused(self, blobs: Sequence[Blob], nbytes: int) -> bool:
        reason = "the disk is full" if self.full else self._lacks_space(nbytes)
        if reason is None:
            return False
        for blob in blobs:
            self._ledger.lost(blob, reason)
        return True

    def _lacks_space(self, nbytes: int) -> str | None:
        free = shutil.disk_usage(self._folder).free
        if free - nbytes < DISK_RESERVE:
            return f"the disk has {free} bytes free, and {DISK_RESERVE} are left alone"
        return None


def _digests(load: Load) -> list[tuple[Blob, Digest]]:
    """Digests of the blobs in a load that have none yet."""
    found = []
    for blob, begin, _ in load.pieces:
        if blob.digested is not None:
            digest = digest_host.digest_bytes(load.chunk.address + begin, blob.count, blob.dtype)
            blob.digested(digest)
            found.append((blob, digest))
    return found
