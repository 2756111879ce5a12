"""Read one rank's calls.jsonl and contents.jsonl. Imports no torch.

A process that was killed may leave a half last line, calls without digests, and digests without calls.
All that is kept and named; a bad line anywhere else means that the file was damaged.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec.structs import force_setattr

from bridge.capture import digest as digests
from bridge.capture.folder import RANK_FILE, SHARD_FILE
from bridge.capture.layout import layout_of
from bridge.capture.record import Call, Digest, RankFiles, TensorRecord
from bridge.errors import CorruptCaptureError, brief

T = TypeVar("T")
#: torch allows 64 dimensions at most; a longer shape is damage, and rendering it would be costly.
_MAX_DIMS = 64
_MOST = 1 << 60
#: What decoding a line of another form raises.
_UNDECODABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


class ContentLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What is known of one content: a line of contents.jsonl; later lines add to earlier ones."""

    content: int
    digest: Digest | None = None
    blob: str | None = None


@dataclass(slots=True, kw_only=True)
class RankCalls:
    """What one rank wrote, joined."""

    rank: int
    folder: Path
    calls: list[Call] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_rank(folder: Path, *, rank: int, listed: RankFiles | None, salvage: bool = False) -> RankCalls:
    """Calls of one rank in order, digests and blob names filled in.

    Args:
        listed: what the manifest says of the rank; None: it did not finish.
        salvage: read what is intact of damaged files, and name what is not.

    Raises:
        CorruptCaptureError: a line that cannot be read, a record that contradicts itself, or a file whose
            sha256 is not the manifest's.
    """
    if salvage and listed is not None:
        try:
            return read_rank(folder, rank=rank, listed=listed)
        except CorruptCaptureError:
            return _salvaged(folder, rank, listed)
    found = RankCalls(rank=rank, folder=folder)
    if listed is not None:
        check_files(folder, listed)
    # A hundred thousand calls are millions of objects, none of them garbage: the collector doubles the time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        calls = read_lines(folder / "calls.jsonl", Call, found.problems, listed)
        contents = read_lines(folder / "contents.jsonl", ContentLine, found.problems, listed)
        found.calls = _joined(calls, contents, folder, rank)
    finally:
        if collecting:
            gc.enable()
    if listed is None:
        found.problems.append(f"rank {rank} did not finish: {len(found.calls)} calls were written")
    elif listed.calls != len(found.calls):
        raise CorruptCaptureError(
            f"{folder / 'calls.jsonl'} has {len(found.calls)} calls, the manifest says {listed.calls}; "
            "capture again"
        )
    return found


def _salvaged(folder: Path, rank: int, listed: RankFiles) -> RankCalls:
    found = RankCalls(rank=rank, folder=folder)
    calls = _intact(folder / "calls.jsonl", Call)
    contents = _intact(folder / "contents.jsonl", ContentLine)
    found.calls = _joined(calls, contents, folder, rank)
    if len(found.calls) != listed.calls:
        found.problems.append(
            f"calls.jsonl of rank {rank} is damaged: {len(found.calls)} of {listed.calls} calls can be read"
        )
    for name in ("calls.jsonl", "contents.jsonl"):
        try:
            checked_bytes(folder / name, listed)
        except CorruptCaptureError as error:
            found.problems.append(str(error).removesuffix("; capture again"))
    return found


def _joined(calls: list[Call], contents: list[ContentLine], folder: Path, rank: int) -> list[Call]:
    """Calls in their order, with the digests and blobs of their tensors."""
    ordered = _in_order(calls, folder / "calls.jsonl", rank)
    joined = Contents(contents, folder)
    joined.check(ordered)
    for call in ordered:
        joined.join(call)
    return ordered


def _intact(path: Path, kind: type[T]) -> list[T]:
    """The lines of a file up to the first that cannot be read; none of one that is not there."""
    if path.is_symlink() or not path.is_file():
        return []
    decoder = msgspec.json.Decoder(kind)
    lines: list[T] = []
    for line in path.read_bytes().splitlines():
        try:
            lines.append(decoder.decode(line))
        except _UNDECODABLE:
            break
    return lines


def check_files(folder: Path, listed: RankFiles) -> None:
    """Raise CorruptCaptureError for a file of a rank that the manifest lists and that is not there.

    Not for a shard: calls and digests can be read without it, and the capture's problems name it.
    """
    for name in listed.files:
        inside = name.removeprefix(f"{folder.name}/")
        if SHARD_FILE.fullmatch(inside):
            continue
        if not RANK_FILE.fullmatch(inside) or not (folder / inside).is_file():
            raise CorruptCaptureError(
                f"{folder.parent / name} is listed in the manifest but missing; capture again"
            )


def read_lines(path: Path, kind: type[T], problems: list[str], listed: RankFiles | None) -> list[T]:
    """Decode a file of JSON lines; a half last line of a torn capture is left out and named.

    Raises:
        CorruptCaptureError: any other line that does not decode, or a wrong sha256.
    """
    if listed is None and not path.is_symlink() and not path.is_file():
        problems.append(f"{path.name} was never written")
        return []
    data = checked_bytes(path, listed)
    decoder = msgspec.json.Decoder(kind)
    end = data.rfind(b"\n") + 1
    if end < len(data):
        problems.append(f"{path.name} ends within a line: the process was killed while writing it")
    try:
        return decoder.decode_lines(data[:end]) if end < len(data) else decoder.decode_lines(data)
    except _UNDECODABLE:
        raise bad_line(data[:end], decoder, path) from None


def checked_bytes(path: Path, listed: RankFiles | None) -> bytes:
    """A file's bytes; CorruptCaptureError when it is missing or its sha256 is not the manifest's."""
    if path.is_symlink() or not path.is_file():
        raise CorruptCaptureError(f"{path} is missing; capture again")
    data = path.read_bytes()
    wanted = listed.files.get(f"{path.parent.name}/{path.name}") if listed else None
    if wanted is not None and hashlib.sha256(data).hexdigest() != wanted:
        raise CorruptCaptureError(
            f"{path} was changed after the capture: its sha256 is not the manifest's; capture again"
        )
    return data


def bad_line(data: bytes, decoder: msgspec.json.Decoder[Any], path: Path) -> CorruptCaptureError:
    """The error that names the first line which does not decode."""
    for number, line in enumerate(data.splitlines(), 1):
        try:
            decoder.decode(line)
        except _UNDECODABLE as error:
            return CorruptCaptureError(
                f"{path} line {number} is not a record of this format: {brief(error)}; capture again"
            )
    return CorruptCaptureError(f"{path} is not JSON lines; capture again")


def _in_order(calls: list[Call], path: Path, rank: int) -> list[Call]:
    # A module call is written when it returns, and again with its gradients: the later line counts.
    latest = {(call.step, call.index): call for call in calls}
    ordered = [latest[place] for place in sorted(latest)]
    check_rank(ordered, path, rank)
    return ordered


def check_rank(calls: list[Call], path: Path, rank: int) -> None:
    """Raise CorruptCaptureError for a call of another rank than its folder's."""
    for call in calls if {call.rank for call in calls} - {rank} else ():
        if call.rank != rank:
            raise CorruptCaptureError(
                f"{path}: call {call.key!r} says it is of rank {call.rank}; capture again"
            )


class Contents:
    """Digests and blob names of one rank by number of content, and what checks records against them."""

    def __init__(self, lines: list[ContentLine], folder: Path) -> None:
        self.digests = {line.content: line.digest for line in lines if line.digest is not None}
        self.blobs = {line.content: line.blob for line in lines if line.blob is not None}
        self._path = folder / "calls.jsonl"
        # Layouts are few and calls are many: each is checked once.
        self._sane: set[tuple[tuple[int, ...], tuple[int, ...], int]] = set()

    def check(self, calls: Sequence[Call]) -> None:
        """Raise CorruptCaptureError for a shape or stride that no tensor can have."""
        parts = [call.inputs for call in calls] + [call.outputs for call in calls]
        for call in calls:
            if call.kind == "module":
                parts += (call.params, call.grad_outputs, call.grad_inputs)
        records = itertools.chain.from_iterable(parts)
        found = {(record.shape, record.stride, record.offset) for record in records} - self._sane
        if all(is_sane(*layout) for layout in found):
            self._sane |= found
            return
        for call in calls:
            for part in (call.inputs, call.outputs, call.params, call.grad_outputs, call.grad_inputs):
                for record in part:
                    if not is_sane(record.shape, record.stride, record.offset):
                        raise CorruptCaptureError(
                            f"{self._path}: call {call.key[:80]!r} has a tensor {record.name[:40]!r} "
                            "with an impossible shape or stride; capture again"
                        )

    def join(self, call: Call) -> None:
        """Fill in the digests and blob names of a call's tensors."""
        digests, blobs = self.digests, self.blobs
        for part in (call.inputs, call.outputs, call.params, call.grad_outputs, call.grad_inputs):
            for record in part:
                number = record.content
                if number >= 0:
                    digest = digests.get(number)
                    if digest is not None:
                        force_setattr(record, "digest", _shown(digest, record))
                    if number in blobs:
                        force_setattr(record, "blob", blobs[number])
        if call.kind == "launch" and call.mutated:
            _keep_what_changed(call)


def _keep_what_changed(call: Call) -> None:
    # On a GPU every argument of a launch counts as written until the digests are here to say otherwise.
    before = {record.name: record.digest for record in call.inputs}
    changed = [r for r in call.outputs if r.digest is None or before.get(r.name) != r.digest]
    if len(changed) < len(call.outputs):
        force_setattr(call, "outputs", tuple(changed))
        force_setattr(call, "mutated", tuple(record.name for record in changed))


def is_sane(shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> bool:
    """Whether a tensor can have this layout."""
    # Beyond these bounds torch itself could not have held the tensor, and its arithmetic would overflow.
    if len(shape) > _MAX_DIMS or not stride:
        return len(shape) <= _MAX_DIMS
    return (
        len(stride) == len(shape)
        and 0 <= offset < _MOST
        and (not shape or (min(shape) >= 0 and min(stride) >= 0))
        and all(step < _MOST for step in stride)
        and prod(size or 1 for size in shape) < _MOST
    )


def _shown(digest: Digest, record: TensorRecord) -> Digest:
    times = repeats(record.shape, record.stride) if 0 in record.stride else 1
    return digest if times == 1 else digests.scaled(digest, times)


def repeats(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """How often a tensor shows each of its elements: more than once with a stride of 0."""
    if 0 not in stride or 0 in shape:
        return 1
    return prod(shape) // layout_of(shape, stride).count
