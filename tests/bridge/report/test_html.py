"""The page as text: complete, offline, escaped, small, the same every time."""

from __future__ import annotations

import base64
import gzip
import json
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from bridge.report import render_html, write_json, write_report
from bridge.report.verdict_model import build_view
from bridge.report.verdict_panels import MAX_BLOCKS, build_panels
from bridge.verify.diff_document import DiffDocument, ScanDocument
from bridge.verify.verdict import ErrorMap, Exponent, Growth, Histogram, Spread, TensorVerdict, Verdict

VOID = frozenset({"meta", "link", "br", "img", "input", "hr"})
HOSTILE = "</script><script>alert(1)</script><!-- \" ' & {{ 7 * 7 }} <img src=x onerror=alert(1)>"


class Outline(HTMLParser):
    """Checks nesting and collects what the tests ask about."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.problems: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.problems.append(tag)


def outline(page: str) -> Outline:
    parser = Outline()
    parser.feed(page)
    parser.close()
    assert parser.problems == []
    assert parser.open == []
    return parser


def packed(page: str, name: str) -> bytes:
    found = re.search(rf'id="{name}">([A-Za-z0-9+/=]*)</script>', page)
    assert found
    return gzip.decompress(base64.b64decode(found[1]))


def test_gold(failing: Verdict, gold: Callable[[str, str], None]) -> None:
    gold("fail.html", render_html(failing))


@pytest.mark.parametrize("name", ["passing", "failing", "undefined", "empty"])
def test_well_formed(name: str, request: pytest.FixtureRequest) -> None:
    parser = outline(render_html(request.getfixturevalue(name)))
    assert ("html", {"lang": "en"}) in parser.tags
    assert all("scope" in attrs for tag, attrs in parser.tags if tag == "th")
    ids = [attrs["id"] for _, attrs in parser.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for _, attrs in parser.tags:
        for reference in ("aria-controls", "aria-labelledby"):
            assert attrs.get(reference) is None or attrs[reference] in ids


def test_offline(failing: Verdict) -> None:
    parser = outline(render_html(failing))
    for tag, attrs in parser.tags:
        assert "src" not in attrs
        if tag in ("a", "link"):
            assert (attrs["href"] or "").startswith(("#", "data:"))
    assert not re.search(r"@import|url\(", render_html(failing).split("</style>")[0])


def test_size(failing: Verdict, tmp_path: Path) -> None:
    write_report(failing, tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 3_000_000


def test_a_figure_that_only_another_case_has(
    passing: Verdict, make_tensor: Callable[..., TensorVerdict]
) -> None:
    """The worst case is all NaN and has no histogram; the next one has."""
    nothing = Histogram(edges=(-1.0, 0.0, 1.0), reference=(0, 0), target=(0, 0))
    worst = make_tensor("y", "all NaN", factor=9.0, histogram=nothing, error_map=None)
    page = render_html(msgspec.structs.replace(passing, tensors=(worst, make_tensor("y", "fine"))))
    assert page.count('<figure class="histogram absent">') == 1
    assert page.count('<figure class="map absent">') == 1
    first, second = json.loads(packed(page, "data"))["results"]["y"]
    assert first["histogram"] is None
    assert second["histogram"] == "histogram-0-1"


def test_many_results_stay_small(passing: Verdict, make_tensor: Callable[..., TensorVerdict]) -> None:
    """Maps beyond the budget are left out, the worst ones last, and the page says so."""
    values = tuple(tuple((i * 64 + j) % 97 / 100 for j in range(64)) for i in range(64))
    large = ErrorMap(rows=4096, cols=4096, row_step=64, col_step=64, values=values)
    many = tuple(
        make_tensor(name, f"case {i}", factor=0.2 + i / 1000, error_map=large)
        for i in range(150)
        for name in "yz"
    )
    verdict = msgspec.structs.replace(passing, tensors=many)
    panels, note = build_panels(build_view(verdict).groups, limit=1000)
    shown = sum(result.map is not None for panel in panels for result in panel.results)
    assert shown == MAX_BLOCKS // 4096
    assert note == f"{300 - shown} maps are left out to keep the page small; the JSON document has them."
    assert all(panel.first.map is not None for panel in panels)
    page = render_html(verdict)
    assert note in page
    assert len(page) < 4_500_000


def test_growth_and_distribution_of_errors_are_shown(
    passing: Verdict, make_tensor: Callable[..., TensorVerdict]
) -> None:
    growth = Growth(
        reference=Exponent(value=0.51, low=0.44, high=0.58, points=18),
        target=Exponent(value=1.02, low=0.95, high=1.09, points=18),
        lengths=(64, 256, 1024),
        seeds=3,
        biased=True,
        statistic="RMS of the relative error",
    )
    spread = Spread(median=1.5e-7, p90=3e-7, p99=5e-7, largest=8e-7, mean=-2e-8)
    row = make_tensor("y", "a case", gate_valid=False, growth=growth, target_spread=spread)
    page = render_html(msgspec.structs.replace(passing, tensors=(row,)))
    assert "n^1.02" in page
    assert (
        "95 % interval 0.95 to 1.09; reference n^0.51, 0.44 to 0.58; lengths 64, 256, 1024, 3 seeds" in page
    )
    assert "|error| of the target" in page
    assert "99 % below 5.00e-7, largest 8.00e-7, mean with sign -2.00e-8" in page


def test_untrusted_text_is_escaped(failing: Verdict) -> None:
    entry = msgspec.structs.replace(
        failing.tensors[2], tensor=HOSTILE, case=HOSTILE, reason=HOSTILE, dtype=HOSTILE
    )
    case = msgspec.structs.replace(
        failing.cases[0],
        name=HOSTILE,
        family=HOSTILE,
        attrs={HOSTILE: HOSTILE},
        launches=(HOSTILE,),
        notes=(HOSTILE,),
    )
    assert failing.diagnosis is not None
    hostile = msgspec.structs.replace(
        failing,
        op=HOSTILE,
        summary=HOSTILE,
        tensors=(entry, msgspec.structs.replace(entry, case="other")),
        cases=(case,),
        diagnosis=msgspec.structs.replace(
            failing.diagnosis, cause=HOSTILE, where=HOSTILE, evidence=HOSTILE, alternatives=(HOSTILE,)
        ),
        power=msgspec.structs.replace(
            failing.power, revealed=(HOSTILE,), not_revealed=(HOSTILE,), would_reveal={HOSTILE: HOSTILE}
        ),
        coverage=msgspec.structs.replace(failing.coverage, not_covered=(HOSTILE,), shapes=(HOSTILE,)),
        fidelity=msgspec.structs.replace(failing.fidelity, detail=HOSTILE, kernels=(HOSTILE,)),
        provenance=msgspec.structs.replace(
            failing.provenance, command=(HOSTILE,), versions={HOSTILE: HOSTILE}
        ),
    )
    page = render_html(hostile)
    parser = outline(page)
    assert not any(tag == "img" or "onerror" in attrs for tag, attrs in parser.tags)
    assert [tag for tag, _ in parser.tags].count("script") == 6
    assert "alert(1)</script>" not in page
    assert "{{ 7 * 7 }}" in page  # Text, not a template.
    assert json.loads(packed(page, "data"))["results"][HOSTILE][0]["reason"] == HOSTILE


def test_data_and_bundle(failing: Verdict) -> None:
    from plotly.offline import get_plotlyjs

    page = render_html(failing)
    data = json.loads(packed(page, "data"))
    assert set(data["results"]) == {"y", "grad_x", "grad_weight"}
    names = set(re.findall(r'data-figure="([^"]+)"', page))
    assert names <= set(data["figures"])
    assert len(names) == 7
    assert packed(page, "plotly").decode() == get_plotlyjs()


def test_same_document_same_page(failing: Verdict) -> None:
    assert render_html(failing) == render_html(failing)


def test_reports_import_neither_torch_nor_numpy(
    failing: Verdict, ab: DiffDocument, scan: ScanDocument, tmp_path: Path
) -> None:
    for name, document in (("verdict", failing), ("diff", ab), ("scan", scan)):
        write_json(document, tmp_path / f"{name}.json")
    script = """
import sys
from pathlib import Path
from bridge.report import read_document, render_markdown, render_text, write_junit, write_report
folder = Path(sys.argv[1])
for name in ("verdict", "diff", "scan"):
    document = read_document(folder / f"{name}.json")
    render_text(document), render_markdown(document)
    write_junit(document, folder / "junit.xml"), write_report(document, folder / "report.html")
heavy = {"torch", "triton", "numpy", "pandas", "plotly.graph_objs"} & set(sys.modules)
assert not heavy, heavy
"""
    result = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "report.html").stat().st_size > 1_000_000
