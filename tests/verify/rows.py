"""Specs and cases that are judged in blocks of rows, and as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from bridge.verify import KernelSpec
from bridge.verify.case import Case
from bridge.verify.judge import constants_of, judge_case
from bridge.verify.options import Options
from bridge.verify.plan import plan_cases
from bridge.verify.weigh import JudgedCase
from tests.verify.corpus import norms
from tests.verify.corpus.pairs import full, normal

WHOLE = Options(sweeps=False, power=False, repeats=1)
BY_ROWS = replace(WHOLE, large_bytes=1)
MADE = "golden and noise were made in "
#: Numbers that golden, reference and target alone decide.
GATE = ("reference_error", "target_error", "rounding_floor", "threshold", "reference_relative_error")


def rms(target: Any = None, shape: tuple[int, ...] = (96, 80)) -> KernelSpec:
    spec = norms.rms("norm")(False)
    return replace(spec, shapes=(shape,), target=target or spec.target)


def spec_of(reference: Any, target: Any = None, **changes: Any) -> KernelSpec:
    fields: dict[str, Any] = {
        "name": "made",
        "reference": reference,
        "target": target or reference,
        "sample": normal(full),
        "inputs": ("x",),
        "grads": ("x",),
        "outputs": ("y",),
        "kind": "reduction",
        "shapes": ((96, 80),),
        "dtypes": ("float16", "float32"),
    }
    return KernelSpec(**(fields | changes))


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x.float(), -1).to(x.dtype)


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none")


def labelled(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: str) -> Any:
    return (
        torch.randn(shape, generator=generator, device=device).to(dtype),
        torch.randint(shape[1], shape[:1], generator=generator, device=device),
    )


GATED = spec_of(
    gated, sample=normal(full, full), inputs=("gate", "up"), grads=("gate", "up"), kind="elementwise"
)
LOSS = spec_of(loss, sample=labelled, inputs=("logits", "labels"), grads=("logits",))


def case_of(spec: KernelSpec, dtype: str) -> Case:
    return plan_cases(replace(spec, dtypes=(dtype,)), options=WHOLE)[0]


def judged_of(spec: KernelSpec, case: Case, options: Options) -> JudgedCase:
    judged = judge_case(spec, case, constants=constants_of(spec), options=options)
    assert judged is not None
    return judged


def both(spec: KernelSpec, case: Case) -> JudgedCase:
    """The case judged by rows; its verdicts, gates and companions are those of the whole."""
    whole, rows = judged_of(spec, case, WHOLE), judged_of(spec, case, BY_ROWS)
    assert any(note.startswith(MADE) for note in rows.record.notes), rows.record.notes
    assert rows.record.verdict == whole.record.verdict
    for one, other in zip(rows.tensors, whole.tensors, strict=True):
        assert (one.tensor, one.verdict, one.structure) == (other.tensor, other.verdict, other.structure)
        assert one.gate_valid == other.gate_valid
        assert list(one.companions) == list(other.companions)
        # Sums over rows come in another order: golden's agree to some 1e-16, the reference's as FP32 does.
        summed = one.shape != tuple(case.inputs[0].shape)
        for name in GATE:
            scale = 1e-12 if not summed else (1e-9 if name in ("target_error", "rounding_floor") else 0.5)
            assert getattr(one, name) == pytest.approx(getattr(other, name), rel=scale), (one.tensor, name)
        assert one.histogram is not None and other.histogram is not None
        assert one.histogram.target == other.histogram.target
        assert one.histogram.reference == other.histogram.reference or summed
        assert one.error_map == other.error_map or summed
        for name, check in one.companions.items():
            assert check.passed == other.companions[name].passed, (one.tensor, name)
    return rows


def with_change(spec: KernelSpec, change: Callable[[torch.Tensor], None]) -> KernelSpec:
    def target(*inputs: torch.Tensor, **attrs: Any) -> torch.Tensor:
        y: torch.Tensor = spec.target(*inputs, **attrs)
        other = y.detach().clone()
        change(other)
        return y + (other - y.detach())

    return replace(spec, target=target)


def as_whole(spec: KernelSpec, dtype: str, why: str) -> None:
    case = case_of(spec, dtype)
    judged = judged_of(spec, case, BY_ROWS)
    assert any(note.startswith("golden was made whole") and why in note for note in judged.record.notes)
    plain = judged_of(spec, case, WHOLE)
    assert judged.tensors == plain.tensors
