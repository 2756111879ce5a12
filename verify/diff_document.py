"""The documents of two-run work: what `diff.json` and `scan.json` hold and every report renders from.

Plain data, no torch. A number that is not finite or was not computed is None, since JSON has no NaN.
`bridge.report` paints them: `write_report(document, path)`, `render_text(document, color=...)` and
`render_markdown(document)`.
The table of calls is columnar and its strings are pooled, because it may have 100,000 rows.

Schema history
    1: first version.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from bridge.capture.record import Digest
from bridge.verify.verdict import ErrorMap, Histogram, Outcome, Verdict

SCHEMA_VERSION = 1

DiffOutcome = Literal["IDENTICAL", "SAME WITHIN ROUNDING", "DIVERGED", "NOTHING MATCHED", "INCONCLUSIVE"]

#: How two calls were paired, strongest evidence first; "" is an unmatched row.
#: override: the user's file; key: same key; moved: same place, another counter or FQN (recompute drift);
#: structure: same op, shapes and producers; renamed: same place in the graph, another op (a collective,
#: a fused kernel); statistics: same op and shapes, closest digests; module: a module call whose inside
#: differs (a fused op in place of several eager ones).
MatchKind = Literal["", "override", "key", "moved", "structure", "renamed", "statistics", "module"]
MATCH_KINDS: tuple[MatchKind, ...] = (
    "", "override", "key", "moved", "structure", "renamed", "statistics", "module",
)  # fmt: skip

#: What a row shows. equal: every compared bit agrees; rounding: differs within the noise floor;
#: differs: beyond it; incomparable: paired, but there is nothing to compare (no digests, other shapes);
#: only a, only b: no partner.
Status = Literal["equal", "rounding", "differs", "incomparable", "only a", "only b"]
STATUSES: tuple[Status, ...] = ("equal", "rounding", "differs", "incomparable", "only a", "only b")

#: Where a difference comes from. born: made by this call out of inputs that agree, or by replay
#: B(x_B) - A(x_B) beyond the noise floor; inherited: explained by its inputs; amplified: inherited, and
#: grown by an ill-conditioned call; nondeterministic: this call draws random numbers, or repeats of one
#: implementation differ; entered: came into the step from outside (a parameter, a batch);
#: unknown: not attributed; "": no difference beyond noise.
Origin = Literal["", "born", "inherited", "amplified", "nondeterministic", "entered", "unknown"]
ORIGINS: tuple[Origin, ...] = (
    "", "born", "inherited", "amplified", "nondeterministic", "entered", "unknown",
)  # fmt: skip

#: What an attribution rests on. replay: counterfactual, tensors were there; structure: the calls differ in
#: what they are told to do (arguments, op, dtype); digest: heuristic on statistics and hashes.
Basis = Literal["", "replay", "structure", "digest"]


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two runs (or the one run of a scan)."""

    label: str  #: "A", "B", or what the user called it
    path: str
    source: Literal["capture", "torchtitan log"] = "capture"
    step: int | None = None
    ranks: tuple[int, ...] = ()
    calls: int = 0
    with_tensors: int = 0  #: calls of which an input or an output is stored, as `bridge capture` counts
    complete: bool = True
    seed: int | None = None
    dtypes: tuple[str, ...] = ()
    device: str = ""
    versions: dict[str, str] = {}
    metrics: dict[str, float | None] = {}
    command: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """Something about the two runs that makes them less comparable."""

    what: str  #: "model", "step", "seed", "dtype", "batch", "version of torch", ...
    a: str
    b: str
    refused: bool = False  #: needed --allow-mismatch to go on
    meaning: str = ""  #: what it does to the result


class CallTable(msgspec.Struct, frozen=True, kw_only=True):
    """One row per pair and per unmatched call, in execution order. All columns have one length.

    A string column holds numbers into `pool`. Relative differences are max|a - b| / max|a| where both
    tensors are stored, otherwise an estimate from the digests; the worst tensor of the call counts.
    """

    pool: tuple[str, ...] = ()
    key_a: list[int] = []  #: pool number; -1: no call on this side
    key_b: list[int] = []
    index_a: list[int] = []  #: Call.index; -1: none
    index_b: list[int] = []
    rank: list[int] = []
    step: list[int] = []
    microbatch: list[int] = []
    kind: list[int] = []  #: pool: "op" | "module" | "launch"
    op_a: list[int] = []  #: pool; -1: none
    op_b: list[int] = []
    phase: list[int] = []  #: pool
    module: list[int] = []  #: pool: FQN (B's where there is one)
    source: list[int] = []  #: pool: "model.py:123 in forward"; -1: unknown
    dtype: list[int] = []  #: pool: dtype of the first output; -1: none
    match: list[int] = []  #: number in MATCH_KINDS
    status: list[int] = []  #: number in STATUSES
    origin: list[int] = []  #: number in ORIGINS
    #: Largest relative difference of what the call reads, a module's upstream gradients too; 0.0: bit-equal.
    in_difference: list[float | None] = []
    #: The same of what it makes, a module's gradients too.
    out_difference: list[float | None] = []
    noise: list[float | None] = []  #: relative difference that rounding alone explains at this call
    rms_a: list[float | None] = []  #: root mean square of the first output
    rms_b: list[float | None] = []

    def __len__(self) -> int:
        return len(self.key_a)


class TensorDiff(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of one pair, both sides."""

    role: Literal["input", "output", "param", "grad_output", "grad_input"]
    name_a: str
    name_b: str
    dtype_a: str = ""
    dtype_b: str = ""
    shape_a: tuple[int, ...] = ()
    shape_b: tuple[int, ...] = ()
    digest_a: Digest | None = None
    digest_b: Digest | None = None
    equal: bool | None = None  #: bit-equal; None: unknown
    difference: float | None = None  #: relative, as in CallTable
    noise: float | None = None
    elementwise: bool = False  #: from the tensors, not estimated from digests
    max_abs: float | None = None  #: these five only when elementwise
    max_rel: float | None = None  #: worst |a - b| / |a| of one element
    ulp: float | None = None  #: worst element, in ULP of the dtype
    bias_ulp: float | None = None  #: mean signed difference in ULP
    different: int | None = None  #: elements that differ
    histogram: Histogram | None = None  #: b - a in ULP is in `target`; `reference` is all zero
    error_map: ErrorMap | None = None  #: |a - b| / (noise * max|a|)
    worst: tuple[WorstPair, ...] = ()
    note: str = ""


class WorstPair(msgspec.Struct, frozen=True, kw_only=True):
    """One of the elements that differ most."""

    index: tuple[int, ...]
    a: float | None
    b: float | None
    ulp: float | None = None


class Attribution(msgspec.Struct, frozen=True, kw_only=True):
    """Where the difference of one pair comes from, with the numbers it rests on.

    born = |B(x_B) - A(x_B)|, inherited = |A(x_B) - A(x_A)|, both max-abs over max|A(x_A)|.
    """

    origin: Origin
    basis: Basis
    born: float | None = None
    inherited: float | None = None
    gain: float | None = None  #: inherited / difference of the inputs
    condition: float | None = None
    repeat: float | None = None  #: spread of repeated runs of A's implementation
    reference_error: float | None = None  #: max|A(x_B) - golden(x_B)|, absolute
    target_error: float | None = None  #: max|B(x_B) - golden(x_B)|, absolute
    threshold: float | None = None
    tensor: str = ""  #: the output that decided
    detail: str = ""


class CallDetail(msgspec.Struct, frozen=True, kw_only=True):
    """Drill-down of one row: made for the rows that matter (suspects, first differences, worst)."""

    row: int
    tensors: tuple[TensorDiff, ...] = ()
    attribution: Attribution | None = None
    arguments: dict[str, tuple[str, str]] = {}  #: scalar arguments and flags that differ, (a, b)
    producers_a: tuple[str, ...] = ()  #: keys
    producers_b: tuple[str, ...] = ()
    how_matched: str = ""


class Suspect(msgspec.Struct, frozen=True, kw_only=True):
    """A call to look at, most likely culprit first."""

    row: int  #: -1: not one row of the table
    key: str
    op: str
    module: str
    module_class: str = ""
    phase: str = ""
    kernel: str | None = None  #: name of the spec that covers it
    reason: str = ""  #: one sentence
    attribution: Attribution | None = None
    source: str | None = None
    verdict: Outcome | None = None  #: of `verify`, where the suspect has a spec
    next_command: str = ""  #: what to run now


class NonFinite(msgspec.Struct, frozen=True, kw_only=True):
    """The first call of one run that makes NaN or Inf out of finite inputs, or that it came in with."""

    side: str
    key: str
    op: str
    module: str
    phase: str
    rank: int
    index: int
    tensor: str
    nan: int
    pos_inf: int
    neg_inf: int
    entered: bool = False  #: not made in the step: a parameter or the batch already had it
    elements: tuple[tuple[int, ...], ...] = ()  #: first offending positions, where the tensor is stored
    because: str = ""  #: "exp of 104.2 exceeds the largest float16 (65504)"
    reach: int = 0  #: calls after it with non-finite outputs
    source: str | None = None


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """What was and was not compared."""

    pairs: int = 0
    by_match: dict[str, int] = {}  #: MatchKind -> pairs
    by_status: dict[str, int] = {}  #: Status -> rows
    by_origin: dict[str, int] = {}
    only_a: int = 0
    only_b: int = 0
    tensors: int = 0  #: tensor pairs compared
    elementwise: int = 0  #: of them element by element
    replayed: int = 0  #: calls attributed by replay
    not_covered: tuple[str, ...] = ()  #: in words, each with its reason


class StepTrace(msgspec.Struct, frozen=True, kw_only=True):
    """`ab --find-step`: a metric per step of baseline, repeated baseline and candidate."""

    metric: str
    steps: tuple[int, ...]
    baseline: tuple[float | None, ...]
    repeat: tuple[float | None, ...] = ()
    candidate: tuple[float | None, ...] = ()
    noise: float | None = None  #: largest relative difference of baseline and repeat
    first_step: int | None = None  #: first step beyond the noise


class DiffDocument(msgspec.Struct, frozen=True, kw_only=True):
    """`diff.json`. Truthy when no divergence was found."""

    schema_version: int = SCHEMA_VERSION
    kind: Literal["diff", "ab"] = "diff"
    outcome: DiffOutcome
    summary: str = ""  #: the answer in one sentence
    a: Side
    b: Side
    mismatches: tuple[Mismatch, ...] = ()
    coverage: Coverage = Coverage()
    first_bit_difference: int | None = None  #: row
    first_divergence: int | None = None  #: row: first beyond the noise floor
    suspects: tuple[Suspect, ...] = ()
    nonfinite: tuple[NonFinite, ...] = ()
    table: CallTable = CallTable()
    details: tuple[CallDetail, ...] = ()
    verdicts: tuple[Verdict, ...] = ()  #: ab: of the suspects that have a spec
    steps: tuple[StepTrace, ...] = ()
    constants: dict[str, float] = {}
    command: tuple[str, ...] = ()
    versions: dict[str, str] = {}
    created: str = ""

    def __bool__(self) -> bool:
        return self.outcome in ("IDENTICAL", "SAME WITHIN ROUNDING")


class ScanTable(msgspec.Struct, frozen=True, kw_only=True):
    """One row per judged call, worst first. String columns hold numbers into `pool`."""

    pool: tuple[str, ...] = ()
    key: list[int] = []
    op: list[int] = []
    module: list[int] = []
    phase: list[int] = []
    source: list[int] = []  #: -1: unknown
    dtype: list[int] = []
    tensor: list[int] = []  #: pool: the output that decided
    reason: list[int] = []  #: pool
    rank: list[int] = []
    index: list[int] = []
    verdict: list[int] = []  #: number in bridge.verify.verdict.OUTCOMES; -1: not judged
    margin: list[float | None] = []  #: target_error / threshold of the worst output; > 1 fails
    target_error: list[float | None] = []
    reference_error: list[float | None] = []
    threshold: list[float | None] = []
    reference_relative_error: list[float | None] = []

    def __len__(self) -> int:
        return len(self.key)


class ScanFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A call that failed, or a pattern over many calls (TF32, a reduced-precision reduction)."""

    key: str
    op: str
    module: str
    row: int
    cause: str  #: "TF32", "reduced-precision accumulation", "overflow", "wrong result", "unexplained"
    evidence: str = ""
    calls: int = 1
    next_command: str = ""


class ScanDocument(msgspec.Struct, frozen=True, kw_only=True):
    """`scan.json`: every captured op against its own FP64 re-computation."""

    schema_version: int = SCHEMA_VERSION
    verdict: Outcome
    summary: str = ""
    capture: Side
    judged: int = 0
    by_verdict: dict[str, int] = {}
    not_judged: dict[str, int] = {}  #: reason -> calls
    findings: tuple[ScanFinding, ...] = ()
    nonfinite: tuple[NonFinite, ...] = ()
    table: ScanTable = ScanTable()
    #: Of the worst rows. A: the op in FP64, B: what was recorded; `arguments` are what the call was told.
    details: tuple[CallDetail, ...] = ()
    constants: dict[str, float] = {}
    seconds: float | None = None
    jobs: int = 1
    command: tuple[str, ...] = ()
    versions: dict[str, str] = {}
    created: str = ""
    extra: dict[str, Any] = {}

    def __bool__(self) -> bool:
        return self.verdict in ("PASS", "PASS WITH LIMITATIONS")
