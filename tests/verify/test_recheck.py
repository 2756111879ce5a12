"""A stored verdict judged again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bridge import cli
from bridge.errors import UsageError
from bridge.report import read_json, write_json
from bridge.verify import recheck
from bridge.verify.request import ConstantChoice
from bridge.verify.verdict import (
    CaseRecord,
    Companion,
    Outcome,
    Provenance,
    TensorVerdict,
    Verdict,
)


def entry(**changes: Any) -> TensorVerdict:
    fields: dict[str, Any] = {
        "tensor": "y",
        "case": "c",
        "verdict": "PASS",
        "dtype": "float32",
        "shape": (2, 2),
        "reference_error": 1.0,
        "target_error": 2.0,
        "rounding_floor": 0.5,
        "threshold": 2.5,
        "reference_relative_error": 0.01,
        "gate_valid": True,
        "companions": {"row gate": Companion(value=0.5, limit=1.0, passed=True)},
    }
    return TensorVerdict(**{**fields, **changes})


def verdict(*tensors: TensorVerdict, outcome: Outcome = "PASS", **changes: Any) -> Verdict:
    case = CaseRecord(name="c", family="declared", dtype="float32", shapes=((2, 2),), input_digests=("a",))
    return Verdict(verdict=outcome, op="op", tensors=tensors, cases=(case,), **changes)


def with_constants(document: Verdict, **choice: float) -> Verdict:
    return recheck.rejudge(document, ConstantChoice(**choice))


def test_the_same_constants_change_nothing() -> None:
    document = verdict(entry())
    assert with_constants(document) is document
    assert with_constants(document, fudge_factor=2.0) is document


def test_a_stricter_factor_fails_and_a_wider_one_does_not_excuse_a_companion() -> None:
    strict = with_constants(verdict(entry()), fudge_factor=1.0)
    assert (strict.verdict, strict.tensors[0].threshold, strict.cases[0].verdict) == ("FAIL", 1.5, "FAIL")
    assert "fudge_factor 2 -> 1" in strict.summary and "1 of 1 tensor verdicts changed" in strict.summary
    failed = Companion(value=2.0, limit=1.0, passed=False)
    bad = entry(verdict="FAIL", target_error=3.0, companions={"row gate": failed, "bias": failed})
    wide = with_constants(verdict(bad, outcome="FAIL"), fudge_factor=10.0)
    assert wide.verdict == "FAIL"
    assert wide.tensors[0].reason == "still fails: row gate, measured against the old constants, bias"


def test_a_failure_of_the_gate_alone_is_lifted_by_a_wider_tolerance() -> None:
    bad = entry(verdict="FAIL", target_error=3.0)
    assert with_constants(verdict(bad, outcome="FAIL"), project_atol=1.0).verdict == "PASS"


def test_structure_and_misdeeds_are_beyond_constants() -> None:
    torn = entry(verdict="FAIL", structure="NaN", target_error=None, threshold=None)
    assert with_constants(verdict(torn, outcome="FAIL"), fudge_factor=100.0).verdict == "FAIL"
    misdeed = entry(verdict="FAIL", reason="the input `x` was written to")
    again = with_constants(verdict(misdeed, outcome="FAIL"), fudge_factor=1.0)
    assert again.verdict == "FAIL"


def test_validity_is_judged_anew() -> None:
    assert with_constants(verdict(entry()), max_reference_relative_error=0.001).verdict == "INCONCLUSIVE"
    invalid = entry(verdict="PASS WITH LIMITATIONS", gate_valid=False, reference_relative_error=0.5)
    lifted = with_constants(
        verdict(invalid, outcome="PASS WITH LIMITATIONS"), max_reference_relative_error=0.9
    )
    assert lifted.verdict == "PASS"


def test_a_fallback_stays_inconclusive() -> None:
    document = verdict(entry(target_error=0.1), outcome="INCONCLUSIVE")
    assert with_constants(document, fudge_factor=1.5).verdict == "INCONCLUSIVE"


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (verdict(entry(threshold=9.0)), "threshold of y of c is 9, its errors give 2.5"),
        (verdict(entry(structure="NaN")), "passes although its structure differs"),
        (verdict(entry(verdict="FAIL")), "the verdict is PASS although a tensor fails"),
    ],
)
def test_an_edited_document_is_refused(document: Verdict, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        with_constants(document)


def test_constants_that_judge_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="--fudge-factor must be a finite number >= 1"):
        with_constants(verdict(entry()), fudge_factor=0.1)


def test_differences_name_what_changed() -> None:
    before = Provenance(versions={"torch": "2.13"}, device="cpu", kernel_file="k.py", kernel_sha256="a")
    after = Provenance(
        versions={"torch": "2.14", "triton": "3"}, device="gpu", kernel_file="k.py", kernel_sha256="b"
    )
    old = verdict(entry(), provenance=before)
    case = msgspec.structs.replace(old.cases[0], input_digests=("b",))
    new = msgspec.structs.replace(old, tensors=(entry(target_error=2.1),), provenance=after, cases=(case,))
    assert recheck.differences(old, old) == ()
    text = "; ".join(recheck.differences(old, new))
    for part in (
        "kernel source changed (k.py)",
        "torch 2.13 -> 2.14",
        "triton absent -> 3",
        "device cpu -> gpu",
        "inputs of 1 cases changed, first c",
        "1 target errors changed, first y of c: 2 -> 2.1",
    ):
        assert part in text


def test_a_request_that_cannot_be_asked_again(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not say how it was asked for"):
        recheck.stored_request(verdict(entry()), ConstantChoice())
    with pytest.raises(UsageError, match="a KernelSpec made in Python"):
        made = Provenance(request={"seed": 0})
        recheck.stored_request(verdict(entry(), provenance=made), ConstantChoice())
    gone = Provenance(request={"op": "x", "capture": str(tmp_path / "gone")})
    with pytest.raises(UsageError, match=r"the capture of this verdict, .*gone, is gone"):
        recheck.stored_request(verdict(entry(), provenance=gone), ConstantChoice())
    kept = recheck.stored_request(
        verdict(entry(), provenance=Provenance(request={"op": "x"})), ConstantChoice(fudge_factor=3.0)
    )
    # The constants of the verdict were declared for it, whatever the spec says by now.
    assert kept.constants == ConstantChoice(
        fudge_factor=3.0, project_atol=0.0, max_reference_relative_error=0.1
    )


def test_the_command_line_writes_a_new_report_and_leaves_the_old_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_json(verdict(entry()), Path("verdict.json"))
    before = Path("verdict.json").read_bytes()
    assert cli.run(["recheck", "--fudge-factor", "1"]) == 1
    assert read_json(Path("recheck/verdict.json")).verdict == "FAIL"
    assert Path("recheck/report.html").is_file() and Path("verdict.json").read_bytes() == before
    assert cli.run(["recheck"]) == 0
    capsys.readouterr()
    assert cli.run(["recheck", "absent.json"]) == 2
    assert "absent.json" in capsys.readouterr().err


def test_arithmetic_needs_no_torch(tmp_path: Path) -> None:
    write_json(verdict(entry()), tmp_path / "verdict.json")
    code = (
        "import sys; from bridge import cli; code = cli.run(['recheck', '--fudge-factor', '1.5']);"
        "print(code, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.rstrip().endswith("0 False")
