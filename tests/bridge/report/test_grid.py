"""The table of calls as the page reads it: nothing is lost on the way, and it is small."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from bridge.report import render_html
from bridge.report.grid import _packed, diff_grid, scan_grid
from bridge.verify.diff_document import DiffDocument, ScanDocument


def unpack(column: dict[str, Any]) -> list[Any]:
    """What the script does."""
    if "same" in column:
        return [column["same"]] * column["count"]
    if "steps" in column:
        total, values = 0, []
        for step in column["steps"]:
            total += step
            values.append(total)
        return values
    return list(column["values"])


@given(st.lists(st.integers(-1, 2**31)))
def test_whole_numbers_survive(values: list[int]) -> None:
    assert unpack(_packed("text", values)) == values


@given(st.lists(st.none() | st.floats(0, 1e6)))
def test_numbers_survive(values: list[float | None]) -> None:
    assert unpack(_packed("number", values)) == values


def test_counting_columns_are_steps() -> None:
    assert _packed("index", list(range(100))) == {"steps": [0] + [1] * 99}
    assert _packed("number", [0.5] * 100) == {"same": 0.5, "count": 100}


def test_diff_columns(diverged: DiffDocument) -> None:
    table = diverged.table
    grid = diff_grid(table)
    columns = {column["name"]: column for column in grid["columns"]}
    keys = [grid["pool"][number] for number in unpack(columns["key"])]
    assert keys[22] == "layers.1.attention/op_2"
    assert keys[52] == table.pool[table.key_a[52]]  # Only in A.
    ops = [grid["pool"][number] for number in unpack(columns["op"])]
    assert ops[:3] == ["mm", "mul.Tensor", "rsqrt"]
    assert unpack(columns["out"]) == table.out_difference
    other = unpack(columns["other"])
    assert [row for row, number in enumerate(other) if number >= 0] == [40, 81]
    assert columns["status"]["choices"][columns["status"]["chosen"]][0] == "beyond noise or unmatched"
    assert set(grid["search"]) <= set(columns)
    assert [column["title"] for column in grid["columns"] if column["width"]] == [
        "Call",
        "Op",
        "Phase",
        "Status",
        "Origin",
        "Input diff",
        "Output diff",
        "Noise",
    ]


def test_scan_columns(scan: ScanDocument) -> None:
    grid = scan_grid(scan.table)
    columns = {column["name"]: column for column in grid["columns"]}
    words = columns["verdict"]["words"]
    verdicts = [words[number] for number in unpack(columns["verdict"])]
    assert verdicts[:4] == ["FAIL", "FAIL", "FAIL", "PASS"]
    assert verdicts[-1] == "not judged"
    assert unpack(columns["margin"])[-1] is None


def test_a_page_of_100_000_calls_is_small(make_diff: Callable[..., DiffDocument]) -> None:
    page = render_html(make_diff(layers=100, calls=500, born=(20_000, 60_001)))
    assert len(page) < 10_000_000
    found = re.search(r'id="data">([A-Za-z0-9+/=]*)</script>', page)
    assert found
    data = json.loads(gzip.decompress(base64.b64decode(found[1])))
    assert data["grid"]["count"] == 100_000
    assert set(data["details"]) == {"20000", "60001"}


def test_untrusted_text_is_escaped(ab: DiffDocument, scan: ScanDocument) -> None:
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"

    def poison(node: Any) -> Any:
        """Put hostile text in the place of every free text of a document."""
        if isinstance(node, msgspec.Struct):
            fixed = {"outcome", "kind", "verdict", "status", "origin", "basis", "role", "source", "family"}
            return msgspec.structs.replace(
                node,
                **{
                    name: poison(getattr(node, name))
                    for name in node.__struct_fields__
                    if name not in fixed and name != "dtype"
                },
            )
        if isinstance(node, str):
            return hostile + node
        if isinstance(node, tuple):
            return tuple(poison(item) for item in node)
        if isinstance(node, dict):
            return {
                hostile + key if isinstance(key, str) else key: poison(value) for key, value in node.items()
            }
        return node

    for document in (ab, scan):
        page = render_html(poison(document))
        assert "<img" not in page
        assert "alert(1)</script>" not in page
        assert page.count("<script") == page.count("</script>") == 6
