"""The verdict for CI."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import msgspec

from bridge.report import render_junit, write_junit
from bridge.verify.verdict import Verdict


def test_gold(failing: Verdict, gold: Callable[[str, str], None]) -> None:
    gold("fail.xml", render_junit(failing))


def test_counts(failing: Verdict, undefined: Verdict, tmp_path: Path) -> None:
    write_junit(failing, tmp_path / "junit.xml")
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot().find("testsuite")
    assert suite is not None
    assert suite.attrib["tests"] == "10"
    assert suite.attrib["failures"] == "4"  # grad_weight in three cases, and the verdict itself
    assert len(suite.findall("testcase/failure")) == 4
    suite = ElementTree.fromstring(render_junit(undefined)).find("testsuite")
    assert suite is not None
    assert suite.attrib["errors"] == "1"
    assert len(suite.findall("testcase/error")) == 1


def test_numbers_are_properties(failing: Verdict) -> None:
    root = ElementTree.fromstring(render_junit(failing))
    case = root.find(".//testcase[@classname='bridge.offset_rmsnorm.grad_weight']")
    assert case is not None
    found = {item.attrib["name"]: item.attrib["value"] for item in case.iter("property")}
    assert float(found["threshold"]) == 0.00390625
    assert float(found["target_error"]) == 27.3 * 0.00390625
    assert found["companion row"] == "54.6 (limit 3.0)"


def test_an_inconclusive_verdict_is_not_green(empty: Verdict) -> None:
    root = ElementTree.fromstring(render_junit(empty))
    assert root.find(".//testcase[@name='verdict']/error") is not None


def test_a_pass_has_no_problem(passing: Verdict) -> None:
    root = ElementTree.fromstring(render_junit(passing))
    assert root.find(".//failure") is None
    assert root.find(".//error") is None


def test_text_that_xml_cannot_hold(failing: Verdict) -> None:
    hostile = msgspec.structs.replace(
        failing.tensors[2], tensor="<a&\"'>", case="\x00\x1b \ufffe \U0001f600", reason="]]>\x08"
    )
    root = ElementTree.fromstring(render_junit(msgspec.structs.replace(failing, tensors=(hostile,))))
    case = root.findall(".//testcase")[1]
    assert case.attrib["classname"] == "bridge.offset_rmsnorm.<a&\"'>"
    assert case.attrib["name"] == "?? ? \U0001f600"
