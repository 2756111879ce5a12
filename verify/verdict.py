"""The verdict document: what `verdict.json` holds and what every report is rendered from.

Plain data, no torch. A number that is not finite or was not computed is None, since JSON has no NaN.

Schema history
    1: first version.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

SCHEMA_VERSION = 1

Outcome = Literal["PASS", "PASS WITH LIMITATIONS", "FAIL", "INCONCLUSIVE"]

#: From best to worst. The overall verdict is the worst over declared and captured cases; of cases that the
#: verifier added a FAIL counts as well, and a limitation is listed under `not_covered`.
OUTCOMES: tuple[Outcome, ...] = ("PASS", "PASS WITH LIMITATIONS", "INCONCLUSIVE", "FAIL")


class Constants(msgspec.Struct, frozen=True, kw_only=True):
    """The gate's constants; declared, hashed and written down before the target runs."""

    fudge_factor: float = 2.0
    project_atol: float = 0.0
    max_reference_relative_error: float = 0.1


class Companion(msgspec.Struct, frozen=True, kw_only=True):
    """One check AND-ed to the gate. It passes when value <= limit."""

    value: float | None  #: None: not finite (then it failed)
    limit: float
    passed: bool
    detail: str = ""  #: where and what, in words: "row 3: 27 % off"
    note: str = ""  #: why the limit is what it is, when that is not the default


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """Signed errors against golden, in ULP of the output dtype, counted in common bins."""

    edges: tuple[float, ...]  #: len(counts) + 1; the outermost bins collect everything beyond
    reference: tuple[int, ...]
    target: tuple[int, ...]


class ErrorMap(msgspec.Struct, frozen=True, kw_only=True):
    """max|target - golden| / threshold per block of the tensor seen as [rows, cols]."""

    rows: int  #: full extent; block (i, j) covers rows i*row_step.., cols j*col_step..
    cols: int
    row_step: int
    col_step: int
    values: tuple[tuple[float | None, ...], ...]


class WorstElement(msgspec.Struct, frozen=True, kw_only=True):
    index: tuple[int, ...]
    golden: float | None
    reference: float | None
    target: float | None
    error: float | None  #: |target - golden|
    ulp: float | None  #: the same in ULP of the target dtype at golden


class Exponent(msgspec.Struct, frozen=True, kw_only=True):
    """p of `error ~ n^p`, with its 95 % confidence interval."""

    value: float
    low: float
    high: float
    points: int  #: runs that it was fitted to


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """How the relative error grows with the length of the reduction: about 1/2 is noise, about 1 a bias."""

    reference: Exponent
    target: Exponent
    lengths: tuple[int, ...]
    seeds: int
    biased: bool  #: the target's interval lies above 0.75, the reference's below, and it is further off
    statistic: str  #: what was fitted, and how


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution of |error| against golden, and the mean of the signed error."""

    median: float
    p90: float
    p99: float
    largest: float
    mean: float


class TensorVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """One output or gradient in one case; a gradient is named `grad_` plus its input's name."""

    tensor: str
    case: str
    verdict: Outcome
    dtype: str
    shape: tuple[int, ...]
    reason: str = ""  #: what decided it, in one clause
    reference_error: float | None = None
    target_error: float | None = None
    rounding_floor: float | None = None
    threshold: float | None = None
    reference_relative_error: float | None = None
    gate_valid: bool = False
    condition: float | None = None  #: sum|t| / |sum t| of the worst element
    growth: Growth | None = None  #: where the gate is not valid on a declared or captured case
    reference_spread: Spread | None = None  #: where the gate is not valid
    target_spread: Spread | None = None
    structure: str | None = None  #: mismatch of shape, dtype, NaN or Inf positions; None: equal
    companions: dict[str, Companion] = {}
    histogram: Histogram | None = None
    error_map: ErrorMap | None = None
    worst: tuple[WorstElement, ...] = ()


class CaseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One set of inputs that all three implementations were run on."""

    name: str  #: "captured layers.0.attention_norm", "(3, 257) float16", ...
    family: str  #: "captured" | "declared" | "smallest" | "tile edge" | "adversarial" | "layout" | ...
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    attrs: dict[str, Any] = {}
    verdict: Outcome = "PASS"
    seconds: float | None = None
    launches: tuple[str, ...] = ()  #: Triton kernels (or custom ops) that the target was seen to run
    input_digests: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """Why it failed: the named cause, or "unexplained"."""

    cause: str
    explained: float | None = None  #: share of the error's energy that the cause reproduces, 0..1
    where: str = ""
    evidence: str = ""
    alternatives: tuple[str, ...] = ()


class Power(msgspec.Struct, frozen=True, kw_only=True):
    """Which wrong variants these inputs revealed, and which they could not have."""

    revealed: tuple[str, ...] = ()
    not_revealed: tuple[str, ...] = ()
    would_reveal: dict[str, str] = {}  #: variant -> the input family that shows it


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    shapes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    repeats: int = 1
    not_covered: tuple[str, ...] = ()  #: in words, each with its reason
    steps: tuple[str, ...] = ()  #: the workflow's steps with the evidence each left


class Fidelity(msgspec.Struct, frozen=True, kw_only=True):
    """Does the replayed target give what the run recorded?"""

    status: Literal["bit-equal", "within spread", "differs", "recorded", "no capture"] = "no capture"
    detail: str = ""
    launched: bool = False  #: the target was seen to run a kernel, not an eager fallback
    kernels: tuple[str, ...] = ()


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Written before the target runs."""

    created: str = ""
    command: tuple[str, ...] = ()
    versions: dict[str, str] = {}
    device: str = ""
    kernel_file: str | None = None
    kernel_sha256: str | None = None
    capture: str | None = None
    seed: int = 0
    interpreter: bool = False  #: TRITON_INTERPRET=1
    request: dict[
        str, Any
    ] = {}  #: what was asked for, so that `bridge recheck` and `bridge repro` can ask again


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The judgement of one kernel. Truthy when it may be trusted (PASS, PASS WITH LIMITATIONS)."""

    schema_version: int = SCHEMA_VERSION
    verdict: Outcome
    op: str
    summary: str = ""  #: the answer in one sentence
    constants: Constants = Constants()
    tensors: tuple[TensorVerdict, ...] = ()
    cases: tuple[CaseRecord, ...] = ()
    diagnosis: Diagnosis | None = None
    power: Power = Power()
    coverage: Coverage = Coverage()
    fidelity: Fidelity = Fidelity()
    provenance: Provenance = Provenance()
    drawn: tuple[str, ...] = ()  #: what failing captured inputs have that the spec's own `sample` never draws

    def __bool__(self) -> bool:
        return self.verdict in ("PASS", "PASS WITH LIMITATIONS")


def worst_outcome(outcomes: list[Outcome]) -> Outcome:
    """The worst of `outcomes` (at least one)."""
    return max(outcomes, key=OUTCOMES.index)
