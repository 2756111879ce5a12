"""Reports of two runs and of a scan: text, Markdown, JUnit, documents, figures."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from bridge.errors import UsageError
from bridge.report import (
    plot,
    read_document,
    read_json,
    render_junit,
    render_markdown,
    render_text,
    write_json,
)
from bridge.report.calls import call_row, layer_of, rows_with, short_op
from bridge.report.diff_model import build_diff_view
from bridge.report.flow_figures import BINS, flow, step_trace
from bridge.report.layer_figures import layer_maps, scan_map
from bridge.report.render import FORMATS, render
from bridge.report.scan_model import build_scan_view
from bridge.verify.diff_document import DiffDocument, ScanDocument
from bridge.verify.verdict import Verdict

Gold = Callable[[str, str], None]


@pytest.mark.parametrize("name", ["diverged", "rounded", "unmatched", "ab", "scan"])
def test_every_document_in_every_form(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    document = request.getfixturevalue(name)
    write_json(document, tmp_path / "document.json")
    assert read_document(tmp_path / "document.json") == document
    for form in FORMATS:
        assert render(document, form)


def test_gold_diff(diverged: DiffDocument, gold: Gold) -> None:
    gold("diff.txt", render_text(diverged))
    gold("diff.md", render_markdown(diverged))
    gold("diff.xml", render_junit(diverged))


def test_gold_ab(ab: DiffDocument, gold: Gold) -> None:
    gold("ab.txt", render_text(ab))


def test_gold_rounding(rounded: DiffDocument, gold: Gold) -> None:
    gold("rounding.txt", render_text(rounded))


def test_gold_scan(scan: ScanDocument, gold: Gold) -> None:
    gold("scan.txt", render_text(scan))
    gold("scan.md", render_markdown(scan))
    gold("scan.xml", render_junit(scan))


def test_a_diff_is_not_a_verdict(diverged: DiffDocument, failing: Verdict, tmp_path: Path) -> None:
    write_json(diverged, tmp_path / "diff.json")
    with pytest.raises(UsageError, match=r"is a diff\.json, not a verdict\.json"):
        read_json(tmp_path / "diff.json")
    write_json(failing, tmp_path / "verdict.json")
    assert read_document(tmp_path / "verdict.json") == failing


def test_a_later_diff_is_refused(diverged: DiffDocument, tmp_path: Path) -> None:
    write_json(msgspec.structs.replace(diverged, schema_version=99), tmp_path / "diff.json")
    with pytest.raises(UsageError, match="schema version 99"):
        read_document(tmp_path / "diff.json")


@pytest.mark.parametrize(
    ("column", "value", "expected"),
    [
        ("key_a", [0], "column key_b has 120 rows, the table has 1"),
        ("status", [17] * 120, "column status points to entry 17 of 6"),
        ("module", [-1] * 120, "column module points to entry -1"),
        ("op_b", [9999] * 120, "column op_b points to entry 9999"),
    ],
)
def test_a_damaged_table_is_named(
    diverged: DiffDocument, tmp_path: Path, column: str, value: list[int], expected: str
) -> None:
    table = msgspec.structs.replace(diverged.table, **{column: value})
    write_json(msgspec.structs.replace(diverged, table=table), tmp_path / "diff.json")
    with pytest.raises(UsageError, match="is damaged") as caught:
        read_document(tmp_path / "diff.json")
    assert expected in str(caught.value)


def test_a_row_that_is_not_there_is_named(diverged: DiffDocument, scan: ScanDocument, tmp_path: Path) -> None:
    write_json(msgspec.structs.replace(diverged, first_divergence=500), tmp_path / "diff.json")
    with pytest.raises(UsageError, match="row 500 is named, the table has 120"):
        read_document(tmp_path / "diff.json")
    finding = msgspec.structs.replace(scan.findings[0], row=60)
    write_json(msgspec.structs.replace(scan, findings=(finding,)), tmp_path / "scan.json")
    with pytest.raises(UsageError, match="row 60 is named, the table has 60"):
        read_document(tmp_path / "scan.json")


def test_unknown_object() -> None:
    with pytest.raises(TypeError, match="got dict"):
        render_text({})  # type: ignore[arg-type]


def test_text_keeps_the_width(ab: DiffDocument, scan: ScanDocument) -> None:
    for document in (ab, scan):
        assert max(map(len, render_text(document).splitlines())) <= 100
        assert max(map(len, render_text(document, width=120, verbose=True).splitlines())) <= 120


def test_colour_only_on_request(diverged: DiffDocument) -> None:
    plain, coloured = render_text(diverged), render_text(diverged, color=True)
    assert re.sub("\x1b\\[[0-9;]*m", "", coloured) == plain != coloured


def test_hostile_names(diverged: DiffDocument) -> None:
    pool = tuple(f"{text}|<b>\x1b[2J`" for text in diverged.table.pool)
    hostile = msgspec.structs.replace(diverged, table=msgspec.structs.replace(diverged.table, pool=pool))
    assert "\x1b" not in render_text(hostile)
    markdown = render_markdown(hostile)
    assert "<b>" not in markdown
    assert ElementTree.fromstring(render_junit(hostile)) is not None


def test_sentences(
    diverged: DiffDocument, rounded: DiffDocument, unmatched: DiffDocument, scan: ScanDocument
) -> None:
    assert build_diff_view(diverged).sentence == (
        "The runs part at layers.1.attention/op_2 (aten::rsqrt.default): "
        "the first call whose output differs although its inputs agree."
    )
    bare = msgspec.structs.replace(diverged, suspects=())
    assert build_diff_view(bare).sentence == "The runs part at layers.1.attention/op_2 (rsqrt)."
    assert build_diff_view(rounded).sentence.startswith("The two runs differ by rounding only, in 11")
    assert build_diff_view(unmatched).sentence == "No call of one run has a counterpart in the other."
    assert (
        build_scan_view(scan).sentence == "TF32 at layers.0.attention_norm/op_0, in 59 captured calls judged."
    )
    clean = msgspec.structs.replace(scan, verdict="PASS", findings=())
    assert (
        build_scan_view(clean).sentence
        == "59 captured calls judged, each as accurate as its eager reference."
    )


def test_junit_counts(
    diverged: DiffDocument, rounded: DiffDocument, ab: DiffDocument, scan: ScanDocument
) -> None:
    def counts(text: str) -> tuple[str, str, str]:
        suite = ElementTree.fromstring(text).find("testsuite")
        assert suite is not None
        return suite.attrib["tests"], suite.attrib["failures"], suite.attrib["errors"]

    assert counts(render_junit(diverged)) == ("3", "3", "0")
    assert counts(render_junit(rounded)) == ("1", "0", "0")
    assert counts(render_junit(ab)) == ("13", "7", "0")
    assert counts(render_junit(scan)) == ("2", "2", "0")


def test_first_rows_are_beyond_noise_or_else_rounding(diverged: DiffDocument, rounded: DiffDocument) -> None:
    rows = build_diff_view(diverged).first_rows(3)
    assert [row.row for row in rows] == [22, 23, 24]
    assert rows[0].in_difference == 0.0
    assert {row.status for row in build_diff_view(rounded).first_rows(50)} <= {"rounding", "only A", "only B"}
    assert list(rows_with([0, 1, 0, 1, 1], frozenset({1}), 2)) == [1, 3]


def test_names() -> None:
    assert short_op("aten::mm.default") == "mm"
    assert short_op("aten::add.Tensor") == "add.Tensor"
    assert short_op("_forward_kernel") == "_forward_kernel"
    assert short_op("torchtitan::rms.default") == "torchtitan::rms.default"
    assert layer_of("layers.3.attention.wq") == ("layers.3", "attention.wq")
    assert layer_of("tok_embeddings") == ("tok_embeddings", "")
    assert layer_of("") == ("(root)", "")


def test_differences_without_a_cause_are_not_called_rounding(
    diverged: DiffDocument, rounded: DiffDocument
) -> None:
    coverage = msgspec.structs.replace(diverged.coverage, by_origin={})
    unclear = msgspec.structs.replace(diverged, outcome="INCONCLUSIVE", suspects=(), coverage=coverage)
    assert dict(build_diff_view(unclear).matching)["Differences"] == "none traced to a call"
    assert dict(build_diff_view(rounded).matching)["Differences"] == "none beyond rounding"


def test_a_moved_call_shows_both_keys(diverged: DiffDocument) -> None:
    row = call_row(diverged.table, 40)
    assert row.key == f"{row.key_b} (A: {row.key_a})"
    assert row.match == "moved"


def test_flow_shows_every_birth_as_a_step(diverged: DiffDocument) -> None:
    figure = flow(diverged)
    traces = {trace["name"]: trace for trace in figure.spec["data"]}
    assert traces["born"]["x"] == [22, 75]
    steps = traces["born so far"]
    assert steps["x"] == [0, 22, 75, 120]
    assert steps["y"][1:] == pytest.approx([0.004, 0.064, 0.064])
    assert "2 births" in figure.summary
    assert "layers.1.attention/op_2 (row 22)" in figure.summary


def test_flow_of_equal_runs(rounded: DiffDocument) -> None:
    figure = flow(rounded)
    assert {trace["name"] for trace in figure.spec["data"]} == {
        "noise floor",
        "bit-equal",
        "within rounding",
        "not compared",
    }
    assert figure.summary == "0 of 120 calls differ beyond the noise floor."


def test_flow_is_binned(make_diff: Callable[..., DiffDocument]) -> None:
    figure = flow(make_diff(layers=40, calls=500, born=(700, 30_001)))
    points = sum(len(trace["x"]) for trace in figure.spec["data"])
    assert points < 6 * BINS
    born = next(trace for trace in figure.spec["data"] if trace["name"] == "born")
    assert born["x"] == [700, 30_001]
    inherited = next(trace for trace in figure.spec["data"] if trace["name"] == "inherited")
    assert max(inherited["y"]) == pytest.approx(0.013)
    ticks = figure.spec["layout"]["xaxis"]["tickvals"]
    assert all(after - before >= 40_000 / 40 for before, after in itertools.pairwise(ticks))


def test_a_difference_that_is_not_finite_is_at_the_top(diverged: DiffDocument) -> None:
    values: list[float | None] = list(diverged.table.out_difference)
    values[23] = None
    figure = flow(
        msgspec.structs.replace(
            diverged, table=msgspec.structs.replace(diverged.table, out_difference=values)
        )
    )
    inherited = next(trace for trace in figure.spec["data"] if trace["name"] == "inherited")
    assert inherited["y"][inherited["x"].index(23)] == max(inherited["y"])
    assert all(math.isfinite(y) for y in inherited["y"])


def test_maps_keep_forward_and_backward_apart(diverged: DiffDocument) -> None:
    maps = layer_maps(diverged)
    assert set(maps) == {"layer-op", "layer-module"}
    data = maps["layer-op"].spec["data"][0]
    axes = maps["layer-op"].spec["layout"]
    assert axes["yaxis"]["ticktext"] == ["layers.0", "layers.1", "layers.2"]
    assert axes["xaxis"]["ticktext"][:4] == ["mm", "mul.Tensor", "rsqrt", "_softmax"]
    assert "mm (backward)" in axes["xaxis"]["ticktext"]
    first = data["z"][0][: len(OPS_FORWARD)]
    assert all(value is not None and value <= 0 for value in first)
    assert data["customdata"][1][2] == 22 or data["z"][1][2] > 0
    assert maps["layer-module"].spec["layout"]["xaxis"]["ticktext"][0] == "attention_norm"


OPS_FORWARD = ("mm", "mul.Tensor", "rsqrt", "_softmax")


def test_scan_map(scan: ScanDocument) -> None:
    figure = scan_map(scan, by="op")
    assert figure.summary.endswith("the worst is layers.0 / mm, 12.0x the threshold.")
    assert len(scan_map(scan, by="module").spec["data"][0]["y"]) == 3


def test_step_trace(ab: DiffDocument) -> None:
    figure = step_trace(ab.steps[0])
    assert figure.summary == "loss leaves the noise at step 13; run-to-run noise 2.00e-6."
    assert figure.spec["data"][1]["y"][12] == pytest.approx(0.013)


def test_plotly_accepts_the_figures(ab: DiffDocument, scan: ScanDocument) -> None:
    """Also as objects in a notebook; plotly's objects reject an unknown property."""
    found = plot(ab, theme="dark")
    assert set(found) == {"flow", "layer-op", "layer-module", "steps loss"}
    assert set(plot(scan)) == {"layer-op", "layer-module"}
    assert all(figure.data for figure in found.values())
