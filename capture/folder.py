"""The capture folder: what belongs into it, who may write it, and how it is replaced. Imports no torch."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from bridge.capture.record import DISK_FULL, Manifest
from bridge.errors import CaptureError, CorruptCaptureError, NotACaptureError, brief

MANIFEST = "manifest.json"
RANK_FOLDER = re.compile(r"rank_(\d{5})")
SHARD_FILE = re.compile(r"tensors-\d{5}\.safetensors")
RANK_FILE = re.compile(r"calls\.jsonl|contents\.jsonl|blobs\.jsonl|rank\.json|tensors-\d{5}\.safetensors")
_LOCK = ".lock"
_FRESH = MANIFEST + ".new"
_TOP = frozenset((MANIFEST, _FRESH, ".gitignore", _LOCK))
_RESERVED = 256 << 10
_MAX_MANIFEST = 256 << 20


def disk_full(problems: Iterable[str], codes: Mapping[str, str] | None = None) -> str | None:
    """The first of a capture's problems that a full disk made; None when there is none.

    Args:
        problems: Of the manifest.
        codes: `problem_codes` of it; None for a capture of a tool that had none: then their text decides.
    """
    if codes is not None:
        return next((text for text in problems if codes.get(text) == DISK_FULL), None)
    return next((text for text in problems if os.strerror(errno.ENOSPC) in text), None)


def rank_folder(root: Path, rank: int) -> Path:
    """Where a rank writes."""
    return root / f"rank_{rank:05d}"


def read_manifest(root: Path) -> Manifest:
    """The manifest of a capture folder.

    Raises:
        NotACaptureError: there is no folder, or no manifest of ours in it.
        CorruptCaptureError: the manifest cannot be read, or is of a newer version.
    """
    path = root / MANIFEST
    if not root.exists():
        raise NotACaptureError(
            f"{root} does not exist; make a capture with `bridge capture --step N --out {root}`"
        )
    around = next((up for up in root.resolve().parents[:2] if (up / MANIFEST).is_file()), None)
    if around is not None and not path.is_file():
        raise NotACaptureError(f"{root} is a part of the capture {around}; name that folder")
    if not root.is_dir():
        raise NotACaptureError(
            f"{root} is not a capture, it is a file; name a folder that `bridge capture` wrote"
        )
    if not path.is_file() or path.is_symlink():
        raise NotACaptureError(
            f"{root} is not a capture: it has no {MANIFEST}; name a folder that `bridge capture` wrote"
        )
    if path.stat().st_size > _MAX_MANIFEST:
        raise CorruptCaptureError(
            f"{path} has {path.stat().st_size} bytes; a manifest has at most {_MAX_MANIFEST}"
        )
    data = path.read_bytes()
    try:
        version = msgspec.json.decode(data, type=_Version).schema_version
    except (msgspec.DecodeError, RecursionError) as error:
        raise CorruptCaptureError(
            f"{path} is not a capture's manifest: {brief(error)}; capture again"
        ) from None
    if version != 1:
        raise CorruptCaptureError(
            f"{path} has schema version {version}, this tool reads 1; use the tool that wrote it"
        )
    try:
        return msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CorruptCaptureError(f"{path} is not a valid manifest: {brief(error)}; capture again") from None


class _Version(msgspec.Struct):
    schema_version: int


def write_manifest(root: Path, manifest: Manifest) -> None:
    """Put a manifest in place in one step, so that a reader sees the old one or the new one."""
    fresh = root / _FRESH
    with fresh.open("r+b" if fresh.exists() else "wb") as file:
        # The room may have been reserved: it is written over first and given back only then.
        file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
        file.write(b"\n")
        # Not forced to the disk: the files it lists are not either, and a step would wait for it.
        file.truncate()
    fresh.replace(root / MANIFEST)


def reserve_manifest(root: Path) -> None:
    """Set aside room for the next manifest, so that a disk that fills up meanwhile does not prevent it."""
    with (root / _FRESH).open("wb") as file:
        file.write(bytes(_RESERVED))


class FolderClaim:
    """The right to write one capture folder, held from before the run until the capture is finished.

    Nothing that stood there is touched until `start`.
    """

    def __init__(self, root: Path, *, force: bool, owner: bool = True) -> None:
        """Check the folder and lock it.

        Args:
            root: The folder; made when missing.
            force: Replace a capture that is there.
            owner: False on ranks other than 0, which write only their own subfolder.

        Raises:
            NotACaptureError: the folder holds something other than a capture.
            CaptureError: it holds a capture and `force` is not given, or another process is writing it.
        """
        self.root = root
        self._force = force
        self._owner = owner
        self._made = False
        if not owner:
            return
        if root.exists() or root.is_symlink():
            _check_replaceable(root, force=force)
        else:
            _make(root)
            self._made = True
        self._descriptor = _lock(root)
        self._cleanup = weakref.finalize(self, _release, root, self._descriptor, self._made)

    def start(self) -> None:
        """Remove the capture that stood here and begin a new one."""
        if not self._owner:
            return
        _check_replaceable(self.root, force=self._force)
        _remove_capture(self.root)
        (self.root / ".gitignore").write_text("*\n")

    def release(self) -> None:
        """Give the lock back; a folder that we made and left empty goes away."""
        if self._owner:
            self._cleanup()


def _make(root: Path) -> None:
    try:
        root.mkdir(parents=True)
    except OSError as error:
        raise CaptureError(
            f"cannot make the capture folder {root}: {error.strerror}; choose another --out"
        ) from None


def _check_replaceable(root: Path, *, force: bool) -> None:
    if not root.is_dir():
        raise NotACaptureError(f"{root} is a file, not a folder; choose another --out")
    try:
        names = {entry.name for entry in root.iterdir()}
    except OSError as error:
        raise CaptureError(f"cannot read the folder {root}: {error.strerror}; choose another --out") from None
    if not names - {_LOCK, ".gitignore"}:
        return
    strangers = sorted(name for name in names if not _belongs(root / name))
    if not strangers and MANIFEST not in names and any(map(RANK_FOLDER.fullmatch, names)):
        raise NotACaptureError(
            f"{root} holds files of a capture and its {MANIFEST} is missing; remove the folder yourself, or "
            "choose another --out"
        )
    if strangers or MANIFEST not in names:
        shown = ", ".join(strangers[:3] or sorted(names)[:3]) + (", ..." if len(strangers) > 3 else "")
        raise NotACaptureError(f"{root} holds something other than a capture ({shown}); choose another --out")
    read_manifest(root)
    if not force:
        raise CaptureError(f"{root} already holds a capture; give --force to replace it, or another --out")


def _belongs(path: Path) -> bool:
    if path.is_symlink():
        return False
    if path.is_dir():
        return RANK_FOLDER.fullmatch(path.name) is not None and all(
            RANK_FILE.fullmatch(inner.name) and inner.is_file() and not inner.is_symlink()
            for inner in path.iterdir()
        )
    return path.name in _TOP


def _remove_capture(root: Path) -> None:
    # Only names that a capture has; the manifest first, so that a half-removed one is not taken for whole.
    (root / MANIFEST).unlink(missing_ok=True)
    for folder in root.iterdir():
        if RANK_FOLDER.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink():
            for file in folder.iterdir():
                if RANK_FILE.fullmatch(file.name):
                    file.unlink()
            folder.rmdir()
    (root / _FRESH).unlink(missing_ok=True)


def _lock(root: Path) -> int:
    try:
        descriptor = os.open(root / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise CaptureError(f"cannot write into {root}: {error.strerror}; choose another --out") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise CaptureError(
            f"another process is writing a capture into {root}; choose another --out"
        ) from None
    return descriptor


def _release(root: Path, descriptor: int, made: bool) -> None:
    with contextlib.suppress(OSError):
        (root / _LOCK).unlink()
    os.close(descriptor)
    if made:
        with contextlib.suppress(OSError):
            root.rmdir()
