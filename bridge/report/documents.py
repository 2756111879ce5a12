"""The kinds of documents, and where the renderer of each kind and form lives."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from bridge.verify.diff_document import DiffDocument, ScanDocument
from bridge.verify.verdict import Verdict

Document = Verdict | DiffDocument | ScanDocument

#: kind -> document; a renderer is `render` in the module KIND_FORM.
KINDS: dict[str, type[Document]] = {"verdict": Verdict, "diff": DiffDocument, "scan": ScanDocument}


def renderer(document: Document, form: str) -> Callable[..., str]:
    """Return the function that renders this kind of document in this form."""
    for kind, cls in KINDS.items():
        if isinstance(document, cls):
            found: Callable[..., str] = importlib.import_module(f"bridge.report.{kind}_{form}").render
            return found
    raise TypeError(
        f"a report needs a Verdict, a DiffDocument or a ScanDocument, got {type(document).__name__}"
    )
