"""Verdicts, diffs and scans to render, and comparison with gold files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from bridge.verify.diff_document import (
    DiffDocument,
    ScanDocument,
)
from bridge.verify.verdict import (
    Companion,
    ErrorMap,
    TensorVerdict,
    Verdict,
)
from tests.bridge.report.sample_runs import ab_document, diff_document, scan_document, side
from tests.bridge.report.sample_verdicts import tensor, verdict

HERE = Path(__file__).parent

#: What may differ between two machines or versions, and how it reads in a gold file.
SCRUBS = (
    (re.compile(r'(id="(?:data|plotly)">)[A-Za-z0-9+/=]*'), r"\1PACKED"),
    (re.compile(r'(content="numerics-bridge )[^"]*'), r"\1VERSION"),
    (re.compile(r"(<style>).*?(</style>)", re.S), r"\1CSS\2"),
    (re.compile(r"(<script>).*?(</script>)", re.S), r"\1JS\2"),
)


@pytest.fixture
def gold() -> Callable[[str, str], None]:
    """Compare a text with tests/bridge/report/gold/NAME; a mismatch is saved under actual/."""

    def compare(name: str, text: str) -> None:
        for pattern, replacement in SCRUBS:
            text = pattern.sub(replacement, text)
        expected = HERE / "gold" / name
        actual = HERE / "actual" / name
        if expected.exists() and expected.read_text("utf-8") == text:
            actual.unlink(missing_ok=True)
            return
        actual.parent.mkdir(exist_ok=True)
        actual.write_text(text, "utf-8")
        pytest.fail(f"differs from gold/{name}; if the new text is right: mv {actual} {expected}")

    return compare


@pytest.fixture
def passing() -> Verdict:
    return verdict()


@pytest.fixture
def failing() -> Verdict:
    return verdict(factor=27.3)


@pytest.fixture
def empty() -> Verdict:
    """A verdict about nothing."""
    return Verdict(verdict="INCONCLUSIVE", op="offset_rmsnorm")


@pytest.fixture
def undefined(failing: Verdict) -> Verdict:
    """Results without numbers: not finite, wrong shape, gate not valid."""
    first, second, third, *_ = failing.tensors
    broken = (
        msgspec.structs.replace(
            first,
            verdict="FAIL",
            target_error=None,
            reason="target is not finite where golden is",
            companions={"row": Companion(value=None, limit=3.0, passed=False)},
            error_map=ErrorMap(rows=1, cols=4, row_step=1, col_step=2, values=((None, 0.5),)),
        ),
        msgspec.structs.replace(
            second,
            verdict="FAIL",
            structure="shape (64, 127), golden has (64, 128)",
            reason="shape (64, 127), golden has (64, 128)",
            reference_error=None,
            target_error=None,
            rounding_floor=None,
            threshold=None,
            reference_relative_error=None,
            condition=None,
            gate_valid=False,
            companions={},
            histogram=None,
            error_map=None,
            worst=(),
        ),
        msgspec.structs.replace(
            third,
            verdict="INCONCLUSIVE",
            gate_valid=False,
            reference_relative_error=0.7,
            target_error=12.0,
            reason="the reference is 70 % off itself",
        ),
    )
    return msgspec.structs.replace(failing, tensors=broken, diagnosis=None)


@pytest.fixture
def make_verdict() -> Callable[..., Verdict]:
    return verdict


@pytest.fixture
def make_tensor() -> Callable[..., TensorVerdict]:
    return tensor


@pytest.fixture
def diverged() -> DiffDocument:
    return diff_document()


@pytest.fixture
def rounded() -> DiffDocument:
    """Two runs that differ by rounding only."""
    return diff_document(born=(), mismatches=())


@pytest.fixture
def unmatched() -> DiffDocument:
    """Two runs without a common call."""
    return DiffDocument(outcome="NOTHING MATCHED", a=side("A", 1.0, 0), b=side("B", 1.0, 0))


@pytest.fixture
def ab() -> DiffDocument:
    return ab_document()


@pytest.fixture
def scan() -> ScanDocument:
    return scan_document()


@pytest.fixture
def make_scan() -> Callable[..., ScanDocument]:
    return scan_document


@pytest.fixture
def make_diff() -> Callable[..., DiffDocument]:
    return diff_document
