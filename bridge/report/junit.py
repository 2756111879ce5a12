"""Any document as JUnit XML, for CI, and the suite that its renderers fill."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

from bridge.report.documents import Document, renderer
from bridge.report.files import write_file
from bridge.report.palette import ROLES

#: What XML 1.0 cannot hold at all, escaped or not.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

#: What settles nothing is an error and not a skip: CI shows a skip as green.
_ELEMENTS = {"fail": "failure", "unclear": "error"}


def render_junit(document: Document) -> str:
    """Return JUnit XML whose properties carry the numbers that decided each result."""
    return renderer(document, "junit")(document)


def write_junit(document: Document, path: Path | str) -> None:
    """Write JUnit XML; raises UsageError when the path cannot be written."""
    write_file(path, render_junit(document))


class Suite:
    """One test suite under construction."""

    def __init__(self, name: str, *, facts: Iterable[tuple[str, str]], created: str) -> None:
        self._element = ElementTree.Element("testsuite", name=_text(name))
        self._counts = {"failure": 0, "error": 0}
        self._cases = 0
        if created:
            self._element.set("timestamp", _text(created))
        _properties(self._element, facts)

    def case(
        self,
        group: str,
        name: str,
        outcome: str,
        *,
        message: str,
        detail: str = "",
        seconds: float | None = None,
        facts: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Add one test case; what fails and what settles nothing carry `message` and `detail`."""
        item = ElementTree.SubElement(self._element, "testcase", classname=_text(group), name=_text(name))
        if seconds is not None:
            item.set("time", f"{seconds:.6f}")
        _properties(item, facts)
        kind = _ELEMENTS.get(ROLES[outcome])
        if kind is not None:
            problem = ElementTree.SubElement(item, kind, type=outcome, message=_text(message))
            problem.text = _text(detail)
            self._counts[kind] += 1
        self._cases += 1

    def xml(self) -> str:
        """Return the finished document."""
        self._element.set("tests", str(self._cases))
        self._element.set("failures", str(self._counts["failure"]))
        self._element.set("errors", str(self._counts["error"]))
        self._element.set("skipped", "0")
        root = ElementTree.Element("testsuites")
        root.append(self._element)
        ElementTree.indent(root)
        return (
            '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"
        )


def _text(text: str) -> str:
    return _FORBIDDEN.sub("?", text)


def _properties(parent: ElementTree.Element, facts: Iterable[tuple[str, str]]) -> None:
    pairs = list(facts)
    if not pairs:
        return
    holder = ElementTree.SubElement(parent, "properties")
    for name, value in pairs:
        ElementTree.SubElement(holder, "property", name=_text(name), value=_text(value))
