"""Read one rank's calls.jsonl and contents.jsonl. Imports no torch.

A process that was killed may leave a half last line, calls without digests, and digests without calls.
All that is kept and named; a bad line anywhere else means that the file was damaged.
"""

from __future__ import annotations

import gc
import hashlib
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec.structs import force_setattr

from bridge.capture import digest as digests
from bridge.capture.folder import RANK_FILE
from bridge.capture.layout import layout_of
from bridge.capture.record import Call, Digest, RankFiles, TensorRecord
from bridge.capture.writer import ContentLine
from bridge.errors import CorruptCaptureError, brief

T = TypeVar("T")
_PARTS = ("inputs", "outputs", "params", "grad_outputs", "grad_inputs")
#: torch allows 64 dimensions at most; a longer shape is damage, and rendering it would be costly.
_MAX_DIMS = 64
_MOST = 1 << 60


@dataclass(slots=True, kw_only=True)
class RankCalls:
    """What one rank wrote, joined."""

    rank: int
    folder: Path
    calls: list[Call] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_rank(root: Path, folder: Path, *, rank: int, listed: RankFiles | None) -> RankCalls:
    """Calls of one rank in order, digests and blob names filled in.

    Raises:
        CorruptCaptureError: a line that cannot be read, a record that contradicts itself, or a file whose
            sha256 is not the manifest's.
    """
    found = RankCalls(rank=rank, folder=folder)
    for name in listed.files if listed else ():
        inside = name.removeprefix(f"{folder.name}/")
        if not RANK_FILE.fullmatch(inside) or not (folder / inside).is_file():
            raise CorruptCaptureError(f"{root / name} is listed in the manifest but missing; capture again")
    # A hundred thousand calls are millions of objects, none of them garbage: the collector doubles the time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        calls = read_lines(folder / "calls.jsonl", Call, found.problems, listed)
        contents = read_lines(folder / "contents.jsonl", ContentLine, found.problems, listed)
        found.calls = _in_order(calls, folder / "calls.jsonl", rank)
        _join(found.calls, contents, folder)
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


def read_lines(path: Path, kind: type[T], problems: list[str], listed: RankFiles | None) -> list[T]:
    """Decode a file of JSON lines; a half last line of a torn capture is left out and named.

    Raises:
        CorruptCaptureError: any other line that does not decode, or a wrong sha256.
    """
    if path.is_symlink() or not path.is_file():
        if listed is not None or path.is_symlink():
            raise CorruptCaptureError(f"{path} is missing; capture again")
        problems.append(f"{path.name} was never written")
        return []
    data = path.read_bytes()
    wanted = listed.files.get(f"{path.parent.name}/{path.name}") if listed else None
    if wanted is not None and hashlib.sha256(data).hexdigest() != wanted:
        raise CorruptCaptureError(
            f"{path} was changed after the capture: its sha256 is not the manifest's; capture again"
        )
    decoder = msgspec.json.Decoder(kind)
    end = data.rfind(b"\n") + 1
    if end < len(data):
        problems.append(f"{path.name} ends within a line: the process was killed while writing it")
    try:
        return decoder.decode_lines(data[:end]) if end < len(data) else decoder.decode_lines(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise _bad_line(data[:end], decoder, path) from None


def _bad_line(data: bytes, decoder: msgspec.json.Decoder[Any], path: Path) -> CorruptCaptureError:
    for number, line in enumerate(data.splitlines(), 1):
        try:
            decoder.decode(line)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            return CorruptCaptureError(
                f"{path} line {number} is not a record of this format: {brief(error)}; capture again"
            )
    return CorruptCaptureError(f"{path} is not JSON lines; capture again")


def _in_order(calls: list[Call], path: Path, rank: int) -> list[Call]:
    # A module call is written when it returns, and again with its gradients: the later line counts.
    latest = {(call.step, call.index): call for call in calls}
    ordered = [latest[place] for place in sorted(latest)]
    for call in ordered:
        if call.rank != rank:
            raise CorruptCaptureError(
                f"{path}: call {call.key!r} says it is of rank {call.rank}; capture again"
            )
    return ordered


def _join(calls: list[Call], contents: list[ContentLine], folder: Path) -> None:
    digest_of: dict[int, Digest] = {}
    blob_of: dict[int, str] = {}
    launches: list[Call] = []
    for line in contents:
        if line.digest is not None:
            digest_of[line.content] = line.digest
        if line.blob is not None:
            blob_of[line.content] = line.blob
    for call in calls:
        if call.kind == "launch" and call.mutated:
            launches.append(call)
        for part in _PARTS:
            for record in getattr(call, part):
                if len(record.shape) > _MAX_DIMS or (record.stride and not _sane(record)):
                    raise CorruptCaptureError(
                        f"{folder / 'calls.jsonl'}: call {call.key[:80]!r} has a tensor {record.name[:40]!r} "
                        "with an impossible shape or stride; capture again"
                    )
                number = record.content
                if number >= 0:
                    if number in digest_of:
                        force_setattr(record, "digest", _shown(digest_of[number], record))
                    if number in blob_of:
                        force_setattr(record, "blob", blob_of[number])
    for call in launches:
        _keep_what_changed(call)


def _keep_what_changed(call: Call) -> None:
    # On a GPU every argument of a launch counts as written until the digests are here to say otherwise.
    before = {record.name: record.digest for record in call.inputs}
    changed = [r for r in call.outputs if r.digest is None or before.get(r.name) != r.digest]
    if len(changed) < len(call.outputs):
        force_setattr(call, "outputs", tuple(changed))
        force_setattr(call, "mutated", tuple(record.name for record in changed))


def _sane(record: TensorRecord) -> bool:
    # Beyond these bounds torch itself could not have held the tensor, and its arithmetic would overflow.
    return (
        len(record.stride) == len(record.shape)
        and 0 <= record.offset < _MOST
        and (not record.shape or (min(record.shape) >= 0 and min(record.stride) >= 0))
        and all(step < _MOST for step in record.stride)
        and prod(size or 1 for size in record.shape) < _MOST
    )


def _shown(digest: Digest, record: TensorRecord) -> Digest:
    # A tensor with a stride of 0 shows its base more than once.
    if 0 not in record.stride or 0 in record.shape:
        return digest
    shown = 1
    for size in record.shape:
        shown *= size
    distinct = layout_of(record.shape, record.stride).count
    return digest if shown == distinct else digests.scaled(digest, shown // distinct)
