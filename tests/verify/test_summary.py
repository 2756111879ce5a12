"""The answer in one sentence, and the overall outcome that it states."""

from __future__ import annotations

from bridge.verify.summary import LONGEST, failure, overall, sentence
from bridge.verify.verdict import CaseRecord, Companion, Diagnosis, Outcome, TensorVerdict
from bridge.verify.weigh import JudgedCase

LONG = "the reciprocal root, rstd (`rsqrt` of x) is rounded to float16 (early cast); and " * 3


def _tensor(name: str, verdict: Outcome, case: str = "declared", **more: object) -> TensorVerdict:
    return TensorVerdict(tensor=name, case=case, verdict=verdict, dtype="float16", shape=(4,), **more)  # type: ignore[arg-type]


def _case(name: str, family: str, *tensors: TensorVerdict) -> JudgedCase:
    record = CaseRecord(name=name, family=family, dtype="float16", shapes=((4,),))
    return JudgedCase(record=record, tensors=list(tensors))


def test_a_failure_says_kernel_tensor_size_and_cause_in_one_short_sentence() -> None:
    failed = [_tensor("grad_x", "FAIL", target_error=24.0, threshold=1.0, gate_valid=True)]
    cause = Diagnosis(cause="1 + w missing in grad_x", explained=0.998)
    assert failure("norm", failed, frozenset({"declared"}), cause) == (
        "norm is wrong in grad_x: 24 times the threshold; 1 + w missing in grad_x (100%)"
    )


def test_it_stays_short_whatever_is_said() -> None:
    failed = [
        _tensor(f"grad_of_a_parameter_with_a_long_name_{i}", "FAIL", structure=LONG, reason=LONG)
        for i in range(9)
    ]
    text = failure(
        "a_kernel_with_a_name" * 9, failed, frozenset(), Diagnosis(cause=f"{LONG} otherwise", explained=0.5)
    )
    assert len(text) <= LONGEST and "\n" not in text and text.endswith("(50%)")


def test_without_the_gate_the_check_that_failed_is_named() -> None:
    check = Companion(value=2.0, limit=1.2, passed=False, detail="0.5 ULP, reference 0.29")
    failed = [
        _tensor(
            "y", "FAIL", target_error=0.5, threshold=1.0, gate_valid=True, companions={"rms ratio": check}
        )
    ]
    assert failure("norm", failed, frozenset(), None) == "norm is wrong in y: rms ratio 2, limit 1.2"
    text = failure("norm", failed, frozenset(), Diagnosis(cause="unexplained"))
    assert text.endswith("; unexplained")


def test_an_excess_on_a_declared_case_is_told_before_a_larger_one_on_an_added_case() -> None:
    failed = [
        _tensor("y", "FAIL", "added", target_error=900.0, threshold=1.0, gate_valid=True),
        _tensor("y", "FAIL", "declared", target_error=3.0, threshold=1.0, gate_valid=True),
    ]
    assert "3 times" in failure("norm", failed, frozenset({"declared"}), None)


def test_a_pass_with_limited_added_cases_says_so_and_stays_a_pass() -> None:
    judged = [
        _case("declared", "declared", _tensor("y", "PASS")),
        _case("added", "adversarial", _tensor("y", "PASS WITH LIMITATIONS", "added")),
    ]
    assert overall(judged) == "PASS"
    text = sentence("norm", "PASS", judged, None)
    assert "all 2 cases" in text and "on 1 of them" in text and "every companion" not in text
    assert "every companion" in sentence("norm", "PASS", judged[:1], None)


def test_a_pass_by_the_noise_budget_alone_does_not_claim_the_gate() -> None:
    over = _tensor("y", "PASS", target_error=1.2, threshold=1.0, gate_valid=True)
    text = sentence("norm", "PASS", [_case("declared", "declared", over)], None)
    assert "on 1 of them the gate alone is over" in text and "within the declared gate" not in text


def test_a_tensor_that_no_own_case_judged_properly_limits_the_whole() -> None:
    judged = [_case("declared", "declared", _tensor("y", "PASS WITH LIMITATIONS", reason="gate not valid"))]
    assert overall(judged) == "PASS WITH LIMITATIONS"
    assert "gate not valid" in sentence("norm", "PASS WITH LIMITATIONS", judged, None)
