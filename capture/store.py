"""Read a capture folder. Reading calls needs no torch; `Capture.tensor` does.

Nothing read here is trusted: names are matched against a fixed form, sizes against the files' sizes,
bytes against hashes, and nothing is ever unpickled.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.capture import folder as folders
from bridge.capture.blobs import BlobIndex
from bridge.capture.layout import contiguous_stride, layout_of
from bridge.capture.lines import RankCalls, read_rank
from bridge.capture.record import Call, Manifest, RankFiles, TensorRecord
from bridge.capture.shards import BlobLine
from bridge.errors import CaptureError, CorruptCaptureError, near_misses

if TYPE_CHECKING:
    import torch

__all__ = ["Capture", "load_capture"]


def load_capture(path: Path | str, *, salvage: bool = False) -> Capture:
    """Open a capture folder; calls are read when they are first asked for.

    Args:
        path: The folder.
        salvage: Read what is intact of damaged files of calls; `problems` names what is not.

    Raises:
        NotACaptureError: the folder is missing or holds something else.
        CorruptCaptureError: the manifest is damaged or of a newer version.
    """
    root = Path(path)
    return Capture(root, folders.read_manifest(root), salvage=salvage)


class Capture:
    """A capture on disk.

    A capture of a process that died is one too: it has what was written, and `problems` says what it lacks.
    """

    def __init__(self, path: Path, manifest: Manifest, *, salvage: bool = False) -> None:
        self.path = path
        self.manifest = manifest
        self._salvage = salvage

    def __repr__(self) -> str:
        return f"Capture({str(self.path)!r}, step={self.manifest.step}, complete={self.complete})"

    @property
    def complete(self) -> bool:
        """The writer finished and nothing went wrong in it."""
        return self.manifest.complete and not self.problems

    @property
    def calls(self) -> Sequence[Call]:
        """All calls of all ranks and steps, by rank, then step, then order of execution."""
        return self._calls

    @property
    def problems(self) -> tuple[str, ...]:
        """What is missing or went wrong, in words; () for a whole capture."""
        found = (
            []
            if self.manifest.complete
            else ["the process that wrote it did not finish: the capture is partial"]
        )
        found.extend(self.manifest.problems)
        for rank in self._ranks:
            found.extend(rank.problems)
        lost = {r.rank for r in self.manifest.ranks} - set(self.rank_folders)
        found.extend(f"the folder of rank {rank} is missing" for rank in sorted(lost))
        found.extend(self.damage)
        return tuple(dict.fromkeys(found))

    def find(self, pattern: str) -> list[Call]:
        """Calls that a glob names by key, operator ("aten::mm.default", "mm"), kernel, FQN or class.

        An FQN or class names the module calls, not the operators inside them.
        """
        match = re.compile(fnmatch.translate(pattern)).match
        return [call for call in self._calls if any(match(name) for name in call_names(call))]

    def call(self, key: str, *, rank: int = 0) -> Call:
        """The call with exactly this key.

        Raises:
            CaptureError: there is none; near misses are named.
        """
        for call in self._calls:
            if call.key == key and call.rank == rank:
                return call
        hint = near_misses(key, {call.key for call in self._calls})
        raise CaptureError(f"{self.path} has no call {key!r} on rank {rank}; {hint}")

    def tensor(self, record: TensorRecord) -> torch.Tensor:
        """The tensor as the call saw it, with its strides and storage offset, on the CPU.

        Raises:
            CaptureError: only a digest was kept.
            CorruptCaptureError: the blob is missing, truncated or changed, or does not fit the record.
        """
        from bridge.capture.rebuild import rebuild

        return rebuild([record], self.blob)[0]

    def tensors(self, call: Call) -> dict[str, torch.Tensor]:
        """A call's stored tensors: "inputs/0", "params/weight", "outputs/0", "grad_outputs/0", ...

        Tensors that shared memory do so again. Those of which only a digest was kept are left out.
        """
        from bridge.capture.rebuild import rebuild

        named = {
            f"{part}/{record.name}": record
            for part in ("inputs", "params", "outputs", "grad_outputs", "grad_inputs")
            for record in getattr(call, part)
            if record.blob is not None
        }
        return dict(zip(named, rebuild(list(named.values()), self.blob), strict=True))

    def blob(self, record: TensorRecord) -> bytes:
        """The stored bytes of a record: its distinct elements in memory order.

        Raises:
            CaptureError, CorruptCaptureError: as `tensor`.
        """
        what = f"{self.path}: tensor {record.name!r} ({record.dtype}{list(record.shape)})"
        if record.blob is None and record.content < 0 and record.digest is None:
            raise CaptureError(
                f"{what} had no values of its own when the call saw it (memory not written yet, or a type "
                "without bytes); nothing can be read"
            )
        if record.blob is None:
            raise CaptureError(f"{what}: only a digest was kept; capture again with --ops naming the call")
        line, data = self._blobs.read(record.blob)
        _check_fits(record, line, self.path)
        return data

    def verify_files(self) -> None:
        """Compare every file with what the manifest says of it, and every blob with its name.

        Raises:
            CorruptCaptureError: the first file that differs or is missing.
        """
        for fault in self.faults():
            raise CorruptCaptureError(fault)

    def faults(self) -> Iterator[str]:
        """What is wrong with the files, one line for each, every byte compared; reads the whole capture."""
        try:
            yield from self._blobs.faults()
        except CorruptCaptureError as error:
            yield str(error)

    @cached_property
    def damage(self) -> tuple[str, ...]:
        """Shards that are missing, truncated or of another header than was written; no blob is read."""
        try:
            return tuple(self._blobs.damage())
        except CorruptCaptureError as error:
            return (str(error),)

    @cached_property
    def _calls(self) -> list[Call]:
        return [call for rank in self._ranks for call in rank.calls]

    @cached_property
    def _ranks(self) -> list[RankCalls]:
        return [
            read_rank(folder, rank=rank, listed=listed, salvage=self._salvage)
            for rank, (folder, listed) in self.rank_folders.items()
        ]

    @cached_property
    def rank_folders(self) -> dict[int, tuple[Path, RankFiles | None]]:
        """Folder of each rank, and what the manifest says of it (None: that rank did not finish).

        Raises:
            CorruptCaptureError: the manifest lists a rank that has no folder.
        """
        found: dict[int, tuple[Path, RankFiles | None]] = {}
        for folder in sorted(self.path.iterdir()):
            name = folders.RANK_FOLDER.fullmatch(folder.name)
            if name and folder.is_dir() and not folder.is_symlink():
                rank = int(name[1])
                found[rank] = folder, next((r for r in self.manifest.ranks if r.rank == rank), None)
        missing = {r.rank for r in self.manifest.ranks} - set(found)
        if missing and not self._salvage:
            lost = folders.rank_folder(self.path, min(missing))
            raise CorruptCaptureError(f"{lost} is missing although the manifest lists it; capture again")
        return found

    @cached_property
    def _hashes(self) -> dict[str, str]:
        return {name: digest for rank in self.manifest.ranks for name, digest in rank.files.items()}

    @cached_property
    def _blobs(self) -> BlobIndex:
        shards = {name: shard for rank in self.manifest.ranks for name, shard in rank.shards.items()}
        places = [folder for folder, _ in self.rank_folders.values()]
        return BlobIndex(self.path, places, self._hashes, shards)


def call_names(call: Call) -> tuple[str, ...]:
    """Everything a pattern may name a call by."""
    if call.kind == "module":
        return (call.key, call.module, call.module_class)
    base = call.op.rsplit(".", 1)[0]
    return (call.key, call.op, base, base.rsplit("::", 1)[-1])


def _check_fits(record: TensorRecord, line: BlobLine, path: Path) -> None:
    wanted = layout_of(record.shape, record.stride or contiguous_stride(record.shape)).count
    have = 1
    for size in line.shape:
        have *= size
    if line.dtype != record.dtype or wanted != have:
        raise CorruptCaptureError(
            f"{path}: tensor {record.name!r} is {record.dtype} with {wanted} distinct elements, but its blob "
            f"{line.blob} in {line.file} is {line.dtype} with {have}; capture again"
        )
