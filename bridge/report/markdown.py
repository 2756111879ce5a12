"""Any document in GitHub-flavoured Markdown, for a pull request, and what its renderers share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from bridge.report.documents import Document, renderer
from bridge.report.files import write_file
from bridge.report.palette import SYMBOLS

#: Markup; an underscore only where it is not inside a word; what makes a bare address a link.
_SPECIAL = re.compile(r"[\\`*\[\]<>#|~&@$]|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])|:(?=//)|\.(?<=www\.)")


def render_markdown(document: Document) -> str:
    """Return the document as Markdown; untrusted text in it cannot form links, images or tags."""
    return renderer(document, "markdown")(document)


def write_markdown(document: Document, path: Path | str) -> None:
    """Write the Markdown report; raises UsageError when the path cannot be written."""
    write_file(path, render_markdown(document))


def escape(text: str) -> str:
    """Return text that GitHub shows as it is, on one line: no markup, link, mention or formula."""
    # Entities work where a backslash does not: in tables and before an @mention.
    return _SPECIAL.sub(lambda found: "".join(f"&#{ord(char)};" for char in found[0]), " ".join(text.split()))


def code(text: str) -> str:
    """Return text for a code span: no backtick, no bar, one line."""
    return " ".join(text.split()).replace("`", "'").replace("|", "/")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[str] = ()) -> str:
    """Return a Markdown table; cells must be escaped already."""
    numbers = frozenset(right)
    lines = [
        "| " + " | ".join(head) + " |",
        "|" + "|".join("---:" if name in numbers else "---" for name in head) + "|",
    ]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def mark(outcome: str) -> str:
    """Return an outcome with its symbol."""
    return f"{SYMBOLS[outcome]} {outcome}"


def folded(title: str, body: str) -> str:
    """Return a section that is closed until it is clicked."""
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"
