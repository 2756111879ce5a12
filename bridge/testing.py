"""For tests of kernels: judge one and raise AssertionError with the numbers that decided it.

    from bridge.testing import verify_kernel

    def test_my_kernel():
        verify_kernel(SPEC)

Works under any test framework; `bridge.pytest_plugin` adds a fixture for pytest. Importing this module
loads no torch.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridge.verify.spec import KernelSpec
    from bridge.verify.verdict import TensorVerdict, Verdict

#: Tensors told in full in an assertion's text; the others are counted.
_SHOWN = 3


class KernelAssertionError(AssertionError):
    """The kernel may not be trusted; `.verdict` is the whole judgement."""

    def __init__(self, message: str, verdict: Verdict) -> None:
        super().__init__(message)
        self.verdict = verdict


def verify_kernel(
    spec: KernelSpec | str | Path, *, strict: bool = False, report: Path | str | None = None, **options: Any
) -> Verdict:
    """Judge a kernel and return the verdict, or raise when it may not be trusted.

    Args:
        spec: a KernelSpec, the name of a known one, or a kernel file as FILE[:SPEC].
        strict: PASS WITH LIMITATIONS raises too.
        report: HTML file to write, also when the kernel fails.
        options: as `bridge.verify.verify_kernel` takes them: capture, dtypes, shapes, sweep, seed, ...

    Raises:
        KernelAssertionError: FAIL or INCONCLUSIVE.
    """
    from bridge.verify import verify_kernel as judge

    # The author's own line and the text below are what a failing test should show.
    __tracebackhide__ = True
    verdict = judge(spec, **options)
    if report is not None:
        from bridge.report import write_report

        write_report(verdict, Path(report))
    if not verdict or (strict and verdict.verdict != "PASS"):
        raise KernelAssertionError(explain(verdict), verdict)
    return verdict


def explain(verdict: Verdict) -> str:
    """The verdict as an assertion's text, the worst tensors first, in the manner of torch.testing."""
    lines = [f"Kernel {verdict.op}: {verdict.verdict}"]
    if verdict.summary:
        lines += [verdict.summary]
    bad = sorted((entry for entry in verdict.tensors if entry.verdict != "PASS"), key=_badness)
    for entry in bad[:_SHOWN]:
        lines += ["", *_tell(entry)]
    if len(bad) > _SHOWN:
        lines += ["", f"... and {len(bad) - _SHOWN} more of {len(verdict.tensors)} tensor verdicts"]
    if verdict.diagnosis is not None:
        found = verdict.diagnosis
        share = f" (explains {found.explained:.0%} of the error)" if found.explained is not None else ""
        lines += ["", f"Cause: {found.cause}{share}"]
        lines += [f"Where: {found.where}"] if found.where else []
    constants = verdict.constants
    lines += [
        "",
        f"Constants: fudge_factor {constants.fudge_factor:g}, project_atol {constants.project_atol:g}, "
        f"max_reference_relative_error {constants.max_reference_relative_error:g}",
    ]
    return "\n".join(lines)


def _badness(entry: TensorVerdict) -> tuple[int, float]:
    rank = {"FAIL": 0, "INCONCLUSIVE": 1}.get(entry.verdict, 2)
    if entry.structure is not None:
        return rank, -math.inf
    if entry.target_error is None or not entry.threshold:
        return rank, 0.0
    return rank, -entry.target_error / entry.threshold


def _tell(entry: TensorVerdict) -> list[str]:
    lines = [
        f"{entry.tensor} of {entry.case}: {entry.verdict}" + (f" ({entry.reason})" if entry.reason else "")
    ]
    if entry.structure is not None:
        lines.append(f"Structure differs: {entry.structure}")
    worst = next((element for element in entry.worst if element.error is not None), None)
    if entry.target_error is not None:
        place = f" at index {worst.index}" if worst is not None else ""
        allowed = "nothing" if entry.threshold is None else f"{entry.threshold:.6g}"
        lines.append(
            f"Greatest absolute difference: {entry.target_error:.6g}{place} (up to {allowed} allowed)"
        )
    if worst is not None:
        values = ", ".join(
            f"{name} {'not finite' if value is None else format(value, '.9g')}"
            for name, value in (
                ("golden", worst.golden),
                ("reference", worst.reference),
                ("kernel", worst.target),
            )
        )
        ulp = f", {worst.ulp:.3g} ULP off" if worst.ulp is not None else ""
        lines.append(f"At {worst.index}: {values}{ulp}")
    if entry.reference_error is not None and entry.rounding_floor is not None:
        valid = "valid" if entry.gate_valid else "not valid: the reference is too inaccurate"
        floor = entry.rounding_floor
        lines.append(f"Reference error {entry.reference_error:.6g}, rounding floor {floor:.6g}, gate {valid}")
    for name, companion in entry.companions.items():
        if not companion.passed:
            value = "not finite" if companion.value is None else f"{companion.value:.4g}"
            lines.append(f"{name}: {value}, up to {companion.limit:.4g} allowed. {companion.detail}".rstrip())
    return lines
