"""Figures: valid plotly, right numbers, readable in words."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import msgspec
import pytest

from bridge.report import plot
from bridge.report.error_figures import DECADES, error_map, histogram
from bridge.report.palette import PALETTE, css_variables, themed
from bridge.report.verdict_margins import FLOOR, margins
from bridge.report.verdict_model import build_view
from bridge.verify.verdict import ErrorMap, Histogram, TensorVerdict, Verdict

THREE = {"margins", "map grad_weight", "histogram grad_weight"}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_plotly_accepts_every_figure(failing: Verdict, undefined: Verdict, theme: str) -> None:
    """plotly's objects reject an unknown property or a value out of range."""
    found = plot(failing, theme=theme)
    assert set(found) >= THREE
    assert all(figure.data for figure in found.values())
    assert plot(undefined, theme=theme)["margins"].data


def test_unknown_theme(failing: Verdict) -> None:
    with pytest.raises(ValueError, match='must be "light" or "dark"'):
        plot(failing, theme="sepia")


def test_no_two_roles_share_a_colour() -> None:
    for shades in zip(*PALETTE.values(), strict=True):
        assert len(set(shades)) == len(shades)
    assert set(css_variables()) == {"light", "dark"}


def test_dark_theme_leaves_no_light_colour(failing: Verdict) -> None:
    spec = margins(build_view(failing)).spec
    shades = {light for light, _ in PALETTE.values()}
    assert any(shade in json.dumps(spec) for shade in shades)
    assert not any(shade in json.dumps(themed(spec, "dark")) for shade in shades)


def contrast(one: str, other: str) -> float:
    """WCAG contrast of two colours."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("role", ["ink", "muted", "pass", "limited", "unclear", "fail"])
def test_text_is_readable_in_both_themes(role: str) -> None:
    for theme in (0, 1):
        assert contrast(PALETTE[role][theme], PALETTE["paper"][theme]) >= 4.5


def test_margins_place_every_check(failing: Verdict) -> None:
    view = build_view(failing)
    figure = margins(view)
    points = {(x, y) for trace in figure.spec["data"] for x, y in zip(trace["x"], trace["y"], strict=True)}
    assert {y for _, y in points} == set(range(len(view.margins)))
    assert (27.3, 0) in points
    over = next(trace for trace in figure.spec["data"] if trace["name"] == "over")
    assert min(over["x"]) > 1
    within = next(trace for trace in figure.spec["data"] if trace["name"] == "within")
    assert max(within["x"]) <= 1
    assert figure.summary.startswith(
        "2 of 9 checks exceed their limit; the furthest is grad_weight gate, 27.3x"
    )


def test_margins_without_numbers(undefined: Verdict) -> None:
    figure = margins(build_view(undefined))
    kinds = {trace["name"] for trace in figure.spec["data"]}
    assert kinds == {"within", "over", "not binding", "not finite or mismatched"}
    assert all(math.isfinite(x) and x >= FLOOR for trace in figure.spec["data"] for x in trace["x"])


def test_many_cases_are_thinned(passing: Verdict, make_tensor: Callable[..., TensorVerdict]) -> None:
    many = tuple(make_tensor("y", f"case {i}", factor=0.2 + i / 20_000) for i in range(5_000))
    figure = margins(build_view(msgspec.structs.replace(passing, tensors=many)))
    assert sum(len(trace["x"]) for trace in figure.spec["data"]) < 300
    gate = [x for trace in figure.spec["data"] for x, y in zip(trace["x"], trace["y"], strict=True) if y == 0]
    assert max(gate) == pytest.approx(0.2 + 4_999 / 20_000, rel=1e-3)


def test_hostile_names_are_escaped(failing: Verdict) -> None:
    hostile = msgspec.structs.replace(failing.tensors[2], tensor="<b>x</b>", case="<a href='x'>y</a>")
    spec = json.dumps(margins(build_view(msgspec.structs.replace(failing, tensors=(hostile,)))).spec)
    assert "<a href" not in spec
    assert "&lt;b&gt;x&lt;/b&gt;" in spec


def test_map_is_logarithmic_and_clamped() -> None:
    source = ErrorMap(rows=10, cols=8, row_step=4, col_step=4, values=((0.0, 0.1), (1.0, None), (10.0, 1e9)))
    figure = error_map(source)
    assert figure.spec["data"][0]["z"] == [[-DECADES, -1.0], [0.0, DECADES], [1.0, DECADES]]
    assert figure.spec["data"][0]["text"][1][1] == "not finite, over"
    assert figure.summary == "Worst block: rows 4..7, columns 4..7, not finite; 3 of 6 blocks over it."


def test_map_of_a_vector() -> None:
    figure = error_map(ErrorMap(rows=1, cols=6, row_step=1, col_step=4, values=((0.5, 0.25),)))
    assert figure.summary == "Worst block: columns 0..3, 0.500x the threshold; no block is over it."


def test_map_of_nothing() -> None:
    assert (
        error_map(ErrorMap(rows=0, cols=0, row_step=1, col_step=1, values=())).summary
        == "The tensor is empty."
    )


def test_histogram_shows_shares() -> None:
    figure = histogram(Histogram(edges=(-1.0, 0.0, 1.0), reference=(1, 3), target=(0, 0)), failed=True)
    reference, target = figure.spec["data"]
    assert reference["y"][:2] == [0.25, 0.75]
    assert target["y"][0] == target["y"][1] == pytest.approx(figure.spec["data"][1]["y"][2], rel=0.01)
    assert (
        figure.summary
        == "reference: mean about 0.250 ULP, 100 % in the outermost bins; target has no finite error."
    )
