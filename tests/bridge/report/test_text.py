"""The verdict in a terminal."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec
import pytest

from bridge.report import render_text
from bridge.verify.verdict import Verdict


def test_gold_fail(failing: Verdict, gold: Callable[[str, str], None]) -> None:
    gold("fail.txt", render_text(failing))


def test_gold_pass(passing: Verdict, gold: Callable[[str, str], None]) -> None:
    gold("pass.txt", render_text(passing))


def test_gold_undefined(undefined: Verdict, gold: Callable[[str, str], None]) -> None:
    gold("undefined.txt", render_text(undefined))


def test_nothing_judged(empty: Verdict) -> None:
    text = render_text(empty)
    assert text.startswith("INCONCLUSIVE  Nothing of offset_rmsnorm was judged.")
    assert "No tensor was judged." in text


@pytest.mark.parametrize("width", [40, 80, 120])
def test_lines_keep_the_width(failing: Verdict, width: int) -> None:
    assert max(map(len, render_text(failing, width=width).splitlines())) <= max(80, width)


def test_columns_are_aligned(failing: Verdict) -> None:
    lines = render_text(failing, verbose=True).splitlines()
    head = next(line for line in lines if line.startswith("Tensor "))
    rows = [line for line in lines if line.startswith(("grad_", "y  ")) and "yes" in line]
    assert len(rows) == 9
    assert {line.index("yes") for line in rows} == {head.index("Gate valid")}
    assert {line[: head.index("Threshold") + 9][-1].isdigit() for line in rows} == {True}


def test_verbose_lists_every_case(failing: Verdict) -> None:
    assert render_text(failing).count("near-zero variance") == 2
    assert render_text(failing, verbose=True).count("near-zero variance") == 3


def test_colour_only_on_request(failing: Verdict) -> None:
    plain, coloured = render_text(failing), render_text(failing, color=True)
    assert "\x1b" not in plain
    assert "\x1b[31m" in coloured
    assert re.sub("\x1b\\[[0-9;]*m", "", coloured) == plain


def test_control_characters_do_not_reach_the_terminal(failing: Verdict) -> None:
    hostile = msgspec.structs.replace(
        failing,
        summary="evil \x1b[2J\x07 sentence",
        tensors=(msgspec.structs.replace(failing.tensors[2], tensor="t\x1b]0;x", case="c\r\nd"),),
    )
    text = render_text(hostile)
    assert not any(char in text for char in "\x1b\x07\r")


def test_ascii(failing: Verdict) -> None:
    assert render_text(failing).isascii()
