"""The verdict for a pull request."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from bridge.report import render_markdown
from bridge.report.markdown import code, escape
from bridge.report.verdict_markdown import MAX_ROWS
from bridge.verify.verdict import TensorVerdict, Verdict


def test_gold(failing: Verdict, gold: Callable[[str, str], None]) -> None:
    gold("fail.md", render_markdown(failing))


def test_nothing_judged(empty: Verdict) -> None:
    assert "? INCONCLUSIVE: `offset_rmsnorm`" in render_markdown(empty)


def test_untrusted_text_makes_no_markup() -> None:
    assert escape("grad_weight") == "grad_weight"
    for hostile in (
        "[a](b)",
        "![a](b)",
        "<img>",
        "a|b",
        "@everyone",
        "#12",
        "`x`",
        "$x$",
        "~~x~~",
        "__x__",
        "*x*",
    ):
        assert not any(char in escape(hostile).replace("&#", "").replace(";", "") for char in "[]<>|@`$~*")
    assert "://" not in escape("see https://example.com")
    assert "\n" not in escape("a\nb")
    assert code("a`b|c\nd") == "a'b/c d"


def test_cells_cannot_break_the_table(failing: Verdict) -> None:
    hostile = msgspec.structs.replace(failing.tensors[2], tensor="a|b", case="c\n| d |")
    rows = [
        line
        for line in render_markdown(msgspec.structs.replace(failing, tensors=(hostile,))).splitlines()
        if "a&#124;b" in line and line.startswith("| **")
    ]
    assert len(rows) == 1
    assert rows[0].count("|") == 8


def test_long_lists_are_cut_and_say_so(passing: Verdict, make_tensor: Callable[..., TensorVerdict]) -> None:
    many = tuple(make_tensor("y", f"case {i}") for i in range(MAX_ROWS + 10))
    text = render_markdown(msgspec.structs.replace(passing, tensors=many))
    assert "10 more results, none worse" in text
    assert len(text) < 65_536
