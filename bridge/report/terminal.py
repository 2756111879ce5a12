"""What text reports share: columns that line up, wrapped paragraphs, colours on request."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

import click

from bridge.report.palette import ROLES

WIDTH = 100

#: Blue and orange-red stay apart for colour-blind readers; the word says it anyway.
_COLOURS = {"pass": "blue", "limited": "yellow", "unclear": "magenta", "fail": "red"}


def align(rows: Sequence[Sequence[str]], *, right: Iterable[int] = (), width: int = WIDTH) -> list[str]:
    """Return rows as lines with columns of equal width, two blanks apart, or one to fit `width`."""
    numbers = frozenset(right)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    gap = "  " if sum(widths) + 2 * (len(widths) - 1) <= width else " "
    return [
        gap.join(
            cell.rjust(size) if i in numbers else cell.ljust(size)
            for i, (cell, size) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


class Painter:
    """Paints lines of one width.

    Args:
        color: Add terminal colours.
        width: Columns to fill; at least 80 are used.
    """

    def __init__(self, *, color: bool, width: int) -> None:
        self.color = color
        self.width = max(80, width)

    def paint(self, text: str, outcome: str) -> str:
        """Return text in the colour of an outcome; done after alignment, since colour codes have no width."""
        role = ROLES[outcome]
        return click.style(text, fg=_COLOURS[role], bold=role == "fail") if self.color else text

    def wrap(self, label: str, text: str, *, indent: int = 14) -> list[str]:
        """Return `label` followed by `text`, wrapped and hanging at `indent`."""
        return textwrap.wrap(
            f"{label:<{indent}}{plain(text)}",
            self.width,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )

    def note(self, label: str, text: str) -> list[str]:
        """Return `label` and `text` as `wrap` does, moved in by two columns."""
        lines = Painter(color=False, width=self.width - 2).wrap(label, text, indent=12)
        return [f"  {line}" for line in lines]

    def indent(self, text: str) -> list[str]:
        """Return text wrapped and moved in by two columns."""
        return textwrap.wrap(
            plain(text), self.width, initial_indent="  ", subsequent_indent="  ", break_long_words=False
        )

    def cut(self, line: str) -> str:
        """Return a line no longer than the width."""
        return line if len(line) <= self.width else line[: self.width - 3] + "..."

    def headline(self, outcome: str, sentence: str, facts: Iterable[tuple[str, str]]) -> list[str]:
        """Return the answer in one sentence and the facts beside it."""
        body = self.wrap(outcome, sentence, indent=len(outcome) + 2)
        body[0] = self.paint(outcome, outcome) + body[0][len(outcome) :]
        return body + [line for label, value in facts for line in self.wrap(label, value)]


def plain(text: str) -> str:
    """Return untrusted text without control characters, which could drive the terminal."""
    return "".join(char if char.isprintable() else " " for char in text)
