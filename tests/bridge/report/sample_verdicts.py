"""A verdict of three tensors in three cases, to render."""

from __future__ import annotations

import math
from typing import Any

from bridge.verify.verdict import (
    CaseRecord,
    Companion,
    Coverage,
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


def tensor(name: str, case: str, *, factor: float = 0.4, **more: Any) -> TensorVerdict:
    """One result whose target error is `factor` times its threshold."""
    threshold = 0.00390625
    failed = factor > 1
    columns = 16
    values = tuple(
        tuple(round(factor * (1 if j >= 12 else 0.2) * (1 + i) / 8, 4) for j in range(columns))
        for i in range(8)
    )
    edges = tuple(i / 2 for i in range(-8, 9))
    facts: dict[str, Any] = {
        "tensor": name,
        "case": case,
        "verdict": "FAIL" if failed else "PASS",
        "dtype": "bfloat16",
        "shape": (64, 128),
        "reason": f"{factor:.3g} times its threshold" if failed else "",
        "reference_error": 0.0009765625,
        "target_error": factor * threshold,
        "rounding_floor": 0.001953125,
        "threshold": threshold,
        "reference_relative_error": 0.000244140625,
        "gate_valid": True,
        "condition": 38.25,
        "companions": {
            "row": Companion(value=factor * 2, limit=3.0, passed=factor * 2 <= 3, detail="row 3: 27 % off"),
            "signed bias": Companion(value=0.01, limit=0.1, passed=True, note="16-bit output"),
        },
        "histogram": Histogram(
            edges=edges,
            reference=tuple(int(9000 * math.exp(-((x + 0.25) ** 2))) for x in edges[:-1]),
            target=tuple(int(9000 * math.exp(-((x + 0.25 - factor / 8) ** 2))) for x in edges[:-1]),
        ),
        "error_map": ErrorMap(rows=64, cols=128, row_step=8, col_step=8, values=values),
        "worst": (
            WorstElement(index=(60, 127), golden=1.5, reference=1.498, target=1.75, error=0.25, ulp=32.0),
            WorstElement(index=(59, 126), golden=-0.5, reference=-0.5, target=None, error=None, ulp=None),
        ),
    }
    return TensorVerdict(**(facts | more))


def verdict(*, factor: float = 0.4, **more: Any) -> Verdict:
    """One document with three tensors in three cases; `factor` is how far grad_weight is off."""
    names = ("captured layers.0.attention_norm", "(3, 257) bfloat16", "near-zero variance (8, 5120) bfloat16")
    failed = factor > 1
    facts: dict[str, Any] = {
        "verdict": "FAIL" if failed else "PASS",
        "op": "offset_rmsnorm",
        "tensors": tuple(
            tensor(name, case, factor=factor / (1 + i) if name == "grad_weight" else 0.3 + 0.05 * i)
            for i, case in enumerate(names)
            for name in ("y", "grad_x", "grad_weight")
        ),
        "cases": tuple(
            CaseRecord(
                name=name,
                family=("captured", "tile edge", "adversarial")[i],
                dtype="bfloat16",
                shapes=((64, 128), (128,)),
                attrs={"eps": 1e-6},
                verdict="FAIL" if failed and i < 2 else "PASS",
                seconds=0.25,
                launches=("_forward_kernel",),
            )
            for i, name in enumerate(names)
        ),
        "diagnosis": Diagnosis(
            cause="the backward uses w where it needs 1 + w",
            explained=0.982,
            where="grad_weight, columns 96..127",
            evidence="that variant is 55 times closer to the target than the right formula",
            alternatives=("eps outside the root (0.12)",),
        )
        if failed
        else None,
        "power": Power(
            revealed=("zeros", "dropped tile"),
            not_revealed=("eps outside the root",),
            would_reveal={"eps outside the root": "a scale sweep down to 1e-4"},
        ),
        "coverage": Coverage(
            shapes=("(64, 128)", "(3, 257)", "(8, 5120)"),
            dtypes=("bfloat16",),
            families=("captured", "tile edge", "adversarial"),
            repeats=3,
            not_covered=("float16: not in the capture",),
            steps=("inputs made once, golden gets them upcast",),
        ),
        "fidelity": Fidelity(
            status="bit-equal", detail="1 of 1 calls", launched=True, kernels=("_forward_kernel",)
        ),
        "provenance": Provenance(
            created="2026-01-02T03:04:05Z",
            command=("bridge", "verify", "--op", "offset_rmsnorm"),
            versions={"torch": "2.13.0", "triton": "3.9.0"},
            device="cpu (x86_64, 2 threads)",
            kernel_file="kernels/offset_rmsnorm/kernel.py",
            kernel_sha256="9f" * 32,
            capture="capture/",
            interpreter=True,
        ),
    }
    return Verdict(**(facts | more))
