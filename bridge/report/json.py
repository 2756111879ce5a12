"""verdict.json, diff.json, scan.json: the one reader and writer of what every report is rendered from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from bridge.errors import UsageError
from bridge.report.documents import KINDS, Document
from bridge.report.files import write_file
from bridge.report.integrity import problem_of
from bridge.verify.verdict import Verdict


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    """As much as tells what a document is, whatever its version."""

    schema_version: int | None = None
    verdict: Any = None
    op: Any = None
    outcome: Any = None
    capture: Any = None

    @property
    def kind(self) -> str:
        if self.outcome is not None:
            return "diff"
        return "scan" if self.capture is not None else "verdict"


def encode(document: Any) -> bytes:
    """Return a document as indented JSON; the same document gives the same bytes."""
    # A number that is not finite becomes null (JSON has no NaN); an attribute that is not plain
    # data (a torch.dtype, say) is kept as its text.
    plain = msgspec.json.encode(document, enc_hook=str, order="deterministic")
    # The columns of a table of 100,000 calls would stand one number a line.
    return plain + b"\n" if len(plain) > _INDENT_BELOW else msgspec.json.format(plain, indent=2) + b"\n"


#: Larger documents are written on one line.
_INDENT_BELOW = 4_000_000


def write_json(document: Document, path: Path | str) -> None:
    """Write a document as JSON; raises UsageError when the path cannot be written."""
    write_file(path, encode(document))


def read_json(path: Path | str) -> Verdict:
    """Read verdict.json.

    Raises:
        UsageError: No such file, not a verdict, or written by a later version.
    """
    document = decode(_read(path), path)
    if not isinstance(document, Verdict):
        kind = "diff.json" if "Diff" in type(document).__name__ else "scan.json"
        raise UsageError(f"{path} is a {kind}, not a verdict.json; `bridge report` renders it")
    return document


def read_document(path: Path | str) -> Document:
    """Read verdict.json, diff.json or scan.json, whichever it is; raises UsageError as `read_json`."""
    return decode(_read(path), path)


def _read(path: Path | str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}; expected a verdict.json") from None


def decode(data: bytes, path: Path | str) -> Document:
    """Return the document in `data`; `path` is only named in errors."""
    kind = "verdict"
    try:
        head = msgspec.json.decode(data, type=_Head)
        kind = head.kind
        latest = msgspec.structs.fields(KINDS[kind])[0].default
        if head.schema_version is not None and head.schema_version > latest:
            raise UsageError(
                f"{path} has schema version {head.schema_version}, this bridge reads up to {latest}; "
                "upgrade numerics-bridge"
            )
        document = msgspec.json.decode(data, type=KINDS[kind])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        verb = "verify" if kind == "verdict" else kind
        raise UsageError(f"{path} is not a {kind}.json: {error}; `bridge {verb}` writes one") from None
    problem = problem_of(document)
    if problem:
        raise UsageError(f"{path} is damaged: {problem}; make it again with `bridge {kind}`")
    return document
