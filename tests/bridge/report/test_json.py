"""verdict.json: what is written is what is read, and a wrong file says so."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bridge.errors import UsageError
from bridge.report import read_json, write_json
from bridge.report.json import decode, encode
from bridge.verify.verdict import (
    OUTCOMES,
    SCHEMA_VERSION,
    CaseRecord,
    Companion,
    Constants,
    Diagnosis,
    ErrorMap,
    Fidelity,
    Histogram,
    Power,
    Provenance,
    TensorVerdict,
    Verdict,
    WorstElement,
)

# A lone surrogate is no text that a file can hold; file names with one do not reach a verdict.
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
number = st.none() | st.floats(allow_nan=False, allow_infinity=False)
size = st.integers(0, 2**40)
texts = st.lists(text, max_size=3).map(tuple)


def short_tuple(items: st.SearchStrategy) -> st.SearchStrategy:
    return st.lists(items, max_size=3).map(tuple)


companions = st.builds(
    Companion,
    value=number,
    limit=st.floats(0, 1e6),
    passed=st.booleans(),
    detail=text,
    note=text,
)
tensors = st.builds(
    TensorVerdict,
    tensor=text,
    case=text,
    verdict=st.sampled_from(OUTCOMES),
    dtype=text,
    shape=short_tuple(size),
    reason=text,
    reference_error=number,
    target_error=number,
    rounding_floor=number,
    threshold=number,
    reference_relative_error=number,
    gate_valid=st.booleans(),
    condition=number,
    structure=st.none() | text,
    companions=st.dictionaries(text, companions, max_size=2),
    histogram=st.none()
    | st.builds(
        Histogram,
        edges=st.just((-1.0, 0.0, 1.0)),
        reference=st.tuples(size, size),
        target=st.tuples(size, size),
    ),
    error_map=st.none()
    | st.builds(
        ErrorMap,
        rows=st.integers(1, 1000),
        cols=st.integers(1, 1000),
        row_step=st.integers(1, 10),
        col_step=st.integers(1, 10),
        values=st.lists(st.tuples(number, number), min_size=1, max_size=2).map(tuple),
    ),
    worst=short_tuple(
        st.builds(
            WorstElement,
            index=short_tuple(size),
            golden=number,
            reference=number,
            target=number,
            error=number,
            ulp=number,
        )
    ),
)
plain = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | text
verdicts = st.builds(
    Verdict,
    verdict=st.sampled_from(OUTCOMES),
    op=text,
    summary=text,
    constants=st.builds(Constants, fudge_factor=st.floats(1, 9)),
    tensors=short_tuple(tensors),
    cases=short_tuple(
        st.builds(
            CaseRecord,
            name=text,
            family=text,
            dtype=text,
            shapes=short_tuple(short_tuple(size)),
            attrs=st.dictionaries(text, plain, max_size=2),
            verdict=st.sampled_from(OUTCOMES),
            seconds=number,
            notes=texts,
        )
    ),
    diagnosis=st.none() | st.builds(Diagnosis, cause=text, explained=number, alternatives=texts),
    power=st.builds(
        Power, revealed=texts, not_revealed=texts, would_reveal=st.dictionaries(text, text, max_size=2)
    ),
    fidelity=st.builds(Fidelity, detail=text, launched=st.booleans(), kernels=texts),
    provenance=st.builds(Provenance, command=texts, versions=st.dictionaries(text, text, max_size=2)),
)


@given(verdicts)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_round_trip(verdict: Verdict) -> None:
    assert decode(encode(verdict), "verdict.json") == verdict


@given(verdicts)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_form_renders_any_document(verdict: Verdict) -> None:
    """No document that fits the schema makes a renderer raise."""
    from bridge.report.render import FORMATS, render

    for form in FORMATS:
        assert render(verdict, form)


def test_file_round_trip(failing: Verdict, tmp_path: Path) -> None:
    path = tmp_path / "verdict.json"
    write_json(failing, path)
    assert read_json(path) == failing
    assert json.loads(path.read_text())["schema_version"] == SCHEMA_VERSION


def test_same_document_same_bytes(failing: Verdict) -> None:
    scrambled = msgspec.structs.replace(
        failing.provenance, versions=dict(reversed(list(failing.provenance.versions.items())))
    )
    assert encode(msgspec.structs.replace(failing, provenance=scrambled)) == encode(failing)


def test_a_number_that_is_not_finite_becomes_null(passing: Verdict, make_tensor) -> None:
    odd = msgspec.structs.replace(
        passing, tensors=(make_tensor("y", "case", target_error=math.inf, threshold=math.nan),)
    )
    entry = json.loads(encode(odd))["tensors"][0]
    assert entry["target_error"] is None
    assert entry["threshold"] is None


def test_an_attribute_that_is_not_plain_data_is_kept_as_text(passing: Verdict) -> None:
    case = msgspec.structs.replace(passing.cases[0], attrs={"out": Path("a") / "b"})
    assert json.loads(encode(case))["attrs"] == {"out": "a/b"}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is not a verdict.json"),
        (b"not json", "is not a verdict.json"),
        (b"[1, 2]", "is not a verdict.json"),
        (b'{"schema_version": 1}', "missing required field `verdict`"),
        (b'{"verdict": "MAYBE", "op": "x"}', "MAYBE"),
        (b'{"verdict": "PASS", "op": "x", "tensors": [{"tensor": 3}]}', "$.tensors[0]"),
        (b'{"schema_version": 99, "verdict": "PASS", "op": "x"}', "upgrade numerics-bridge"),
        (b'{"verdict": "PASS", "op": "\xff"}', "is not a verdict.json"),
    ],
)
def test_a_wrong_file_is_named(content: bytes, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read_json(path)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_json(tmp_path / "none.json")
