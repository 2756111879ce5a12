"""What a report shows, before anything is painted."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from bridge.report.verdict_model import COLUMNS, GATE, build_view
from bridge.verify.verdict import Companion, TensorVerdict, Verdict


def test_columns_are_those_of_the_method() -> None:
    assert COLUMNS == (
        "Tensor",
        "Ref/golden",
        "Condition",
        "Target error",
        "Threshold",
        "Gate valid",
        "Verdict",
    )


def test_worst_tensor_and_worst_case_come_first(failing: Verdict) -> None:
    view = build_view(failing)
    assert [group.tensor for group in view.groups] == ["grad_weight", "y", "grad_x"]
    assert view.groups[0].worst.case == "captured layers.0.attention_norm"
    ranks = [row.rank for row in view.groups[0].rows]
    assert ranks == sorted(ranks, reverse=True)
    assert view.groups[0].tally == "3 of 3 cases FAIL"
    assert view.groups[1].tally == "3 cases"


def test_row_cells(failing: Verdict) -> None:
    row = build_view(failing).groups[0].worst
    assert row.cells == ("grad_weight", "9.77e-4 (0.0244 %)", "38.2", "0.107", "3.91e-3", "yes", "FAIL")
    assert row.exact[3] == repr(27.3 * 0.00390625)


def test_gate_stands_before_companions_and_the_worst_companion_next(failing: Verdict) -> None:
    view = build_view(failing)
    checks = [(margin.tensor, margin.check) for margin in view.margins]
    assert checks[:3] == [("grad_weight", GATE), ("grad_weight", "row"), ("grad_weight", "signed bias")]
    assert len(checks) == 9
    assert not view.margins[0].passed
    assert view.margins[0].worst.size == "27.3x"
    assert view.margins[3].passed


def test_a_companion_alone_can_fail(passing: Verdict, make_tensor: Callable[..., TensorVerdict]) -> None:
    entry = make_tensor(
        "y",
        "case",
        verdict="FAIL",
        reason="",
        companions={"signed bias": Companion(value=0.5, limit=0.1, passed=False, detail="z -44")},
    )
    view = build_view(msgspec.structs.replace(passing, verdict="FAIL", tensors=(entry,)))
    assert view.margins[0].passed
    assert not view.margins[1].passed
    assert view.sentence == "offset_rmsnorm is wrong: y on case, z -44."


def test_a_gate_that_is_not_valid_decides_nothing(undefined: Verdict) -> None:
    view = build_view(undefined)
    gate = next(margin for margin in view.margins if margin.tensor == "grad_weight" and margin.check == GATE)
    assert not gate.worst.binding
    assert not gate.worst.passed
    assert gate.passed  # It failed no one.


def test_missing_numbers_are_told_apart(undefined: Verdict) -> None:
    rows = {group.tensor: group.worst for group in build_view(undefined).groups}
    assert rows["y"].cells[3] == "not finite"
    assert rows["grad_x"].cells[1:5] == ("-", "-", "mismatch", "-")
    assert rows["y"].checks[0][1].size == "not finite"
    assert rows["grad_x"].checks[0][1].size == "mismatch"


def test_sentences(passing: Verdict, failing: Verdict, empty: Verdict, undefined: Verdict) -> None:
    assert build_view(failing).sentence == (
        "offset_rmsnorm is wrong: grad_weight on captured layers.0.attention_norm, 27.3 times its threshold. "
        "Cause: the backward uses w where it needs 1 + w."
    )
    assert build_view(passing).sentence == (
        "offset_rmsnorm is as accurate as its reference in 3 cases; closest call: "
        "y on near-zero variance (8, 5120) bfloat16, 0.400x its threshold."
    )
    assert build_view(empty).sentence == "Nothing of offset_rmsnorm was judged."
    assert build_view(msgspec.structs.replace(failing, summary="Said before.")).sentence == "Said before."
    assert "not finite" in build_view(undefined).sentence


def test_facts_count_what_was_judged(failing: Verdict) -> None:
    facts = dict(build_view(failing).facts)
    assert facts["Judged"] == "9 results: 3 tensors x 3 cases"
    assert facts["From the run"] == "1 captured call"
    assert facts["Replay"] == "bit-equal"
