"""verdict.json: the one reader and writer of the document that every report is rendered from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from bridge.errors import UsageError
from bridge.report.files import write_file
from bridge.verify.verdict import SCHEMA_VERSION, Verdict


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    """As much as tells what a document is, whatever its version."""

    schema_version: int | None = None


def encode(document: Any) -> bytes:
    """Return a document as indented JSON; the same document gives the same bytes."""
    # A number that is not finite becomes null (JSON has no NaN); an attribute that is not plain
    # data (a torch.dtype, say) is kept as its text.
    plain = msgspec.json.encode(document, enc_hook=str, order="deterministic")
    return msgspec.json.format(plain, indent=2) + b"\n"


def write_json(verdict: Verdict, path: Path | str) -> None:
    """Write verdict.json; raises UsageError when the path cannot be written."""
    write_file(path, encode(verdict))


def read_bytes(path: Path | str) -> bytes:
    """Return a document's bytes; raises UsageError when they cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}; expected a verdict.json") from None


def read_json(path: Path | str) -> Verdict:
    """Read verdict.json.

    Raises:
        UsageError: No such file, not a verdict, or written by a later version.
    """
    return decode(read_bytes(path), path)


def decode(data: bytes, path: Path | str) -> Verdict:
    """Return the verdict in `data`; `path` is only named in errors."""
    try:
        head = msgspec.json.decode(data, type=_Head)
        version = head.schema_version
        if version is not None and version > SCHEMA_VERSION:
            raise UsageError(
                f"{path} has schema version {version}, this bridge reads up to {SCHEMA_VERSION}; "
                "upgrade numerics-bridge"
            )
        return msgspec.json.decode(data, type=Verdict)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not a verdict.json: {error}; `bridge verify` writes one") from None
