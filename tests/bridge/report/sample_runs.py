"""A diff, an ab run and a scan, to render."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from bridge.capture.record import Digest
from bridge.verify.diff_document import (
    MATCH_KINDS,
    ORIGINS,
    STATUSES,
    Attribution,
    CallDetail,
    CallTable,
    DiffDocument,
    Mismatch,
    NonFinite,
    ScanDocument,
    ScanFinding,
    ScanTable,
    Side,
    StepTrace,
    Suspect,
    TensorDiff,
    WorstPair,
)
from bridge.verify.diff_document import Coverage as RunCoverage
from bridge.verify.verdict import (
    OUTCOMES,
)
from tests.bridge.report.sample_verdicts import tensor, verdict

ROLES = ("attention_norm", "attention.wq", "attention", "feed_forward.w1", "ffn_norm")
OPS = ("aten::mm.default", "aten::mul.Tensor", "aten::rsqrt.default", "aten::_softmax.default")


def digest(scale: float) -> Digest:
    return Digest(
        count=1000,
        sum=12.5 * scale,
        abs_sum=800.0 * scale,
        sq_sum=1000.0 * scale**2,
        min=-3.0,
        max=3.25 * scale,
        nan=0,
        pos_inf=0,
        neg_inf=0,
        hash=f"{int(scale * 1000):016x}",
    )


def call_table(layers: int, calls: int, born: tuple[int, ...]) -> CallTable:
    """A step of `layers` x `calls` forward calls and as many backward; it differs from the first birth on."""
    pool: dict[str, int] = {}
    columns: dict[str, list[Any]] = {name: [] for name in CallTable.__struct_fields__ if name != "pool"}

    def number(text: str | None) -> int:
        return -1 if text is None else pool.setdefault(text, len(pool))

    places = [("forward", i, j) for i in range(layers) for j in range(calls)]
    places += [("backward", i, j) for i in reversed(range(layers)) for j in range(calls)]
    for row, (phase, layer, j) in enumerate(places):
        module, op = f"layers.{layer}.{ROLES[j % len(ROLES)]}", OPS[j % len(OPS)]
        key = f"{module}/{'' if phase == 'forward' else 'backward/'}op_{j}"
        key_a: str | None = key
        key_b: str | None = key
        status, origin, match = "equal", "", "key"
        inside: float | None = 0.0
        outside: float | None = 0.0
        if row in born:
            status, origin, outside = "differs", "born", 0.004 * (1 + born.index(row)) ** 4
            inside = 0.0 if row == born[0] else 0.004
        elif born and row > born[0]:
            status, origin, inside = "differs", "inherited", 0.004 + row % 7 / 1000
            outside = inside * (0.5 + row % 5 / 5)
        elif row % 9 == 5:
            status, inside, outside = "rounding", 0.0, 1e-7 * (1 + row % 3)
        if row % 41 == 40:
            key_a, match = f"{key}_before", "moved"
        elif row % 97 == 96:
            key_a, status, origin, match, inside, outside = None, "only b", "", "", None, None
        elif row % 53 == 52:
            key_b, status, origin, match, inside, outside = None, "only a", "", "", None, None
        elif row % 31 == 30:
            status, origin, inside, outside = "incomparable", "", None, None
        line: dict[str, Any] = {
            "key_a": number(key_a),
            "key_b": number(key_b),
            "index_a": -1 if key_a is None else row,
            "index_b": -1 if key_b is None else row + 1,
            "rank": 0,
            "step": 100,
            "microbatch": 0,
            "kind": number("op"),
            "op_a": -1 if key_a is None else number(op),
            "op_b": -1 if key_b is None else number(op),
            "phase": number(phase),
            "module": number(module),
            "source": number(f"model.py:{100 + j} in forward"),
            "dtype": number("bfloat16"),
            "match": MATCH_KINDS.index(match),
            "status": STATUSES.index(status),
            "origin": ORIGINS.index(origin),
            "in_difference": inside,
            "out_difference": outside,
            "noise": 0.001,
            "rms_a": 1.0 + row % 11 / 100,
            "rms_b": 1.0 + row % 13 / 100,
        }
        for name, value in line.items():
            columns[name].append(value)
    return CallTable(pool=tuple(pool), **columns)


def diff_document(
    *, layers: int = 3, calls: int = 20, born: tuple[int, ...] = (22, 75), **more: Any
) -> DiffDocument:
    """Two runs that part at the rows `born`; none: they differ by rounding."""
    table = call_table(layers, calls, born)
    attribution = Attribution(
        origin="born",
        basis="replay",
        born=0.004,
        inherited=0.0,
        condition=38.0,
        repeat=0.0,
        reference_error=0.0009,
        target_error=0.11,
        threshold=0.0039,
        tensor="output 0",
        detail="A on B's inputs gives A's output bit for bit, B does not",
    )
    sample = tensor("y", "case", factor=4.0)

    def key(row: int) -> str:
        return table.pool[table.key_b[row]]

    suspects = tuple(
        Suspect(
            row=row,
            key=key(row),
            op=table.pool[table.op_b[row]],
            module=table.pool[table.module[row]],
            phase=table.pool[table.phase[row]],
            kernel="offset_rmsnorm",
            reason="the first call whose output differs although its inputs agree",
            attribution=attribution,
            source="model.py:102 in forward",
            verdict="FAIL",
            next_command=f"bridge verify --op offset_rmsnorm --from b --call {key(row)}",
        )
        for row in born
    )
    details = tuple(
        CallDetail(
            row=row,
            attribution=attribution,
            how_matched="same key",
            arguments={"eps": ("1e-06", "1e-05")},
            producers_a=(key(row - 1),),
            producers_b=(key(row - 1), key(row - 2)),
            tensors=(
                TensorDiff(
                    role="input",
                    name_a="0",
                    name_b="0",
                    dtype_a="bfloat16",
                    dtype_b="bfloat16",
                    shape_a=(64, 128),
                    shape_b=(64, 128),
                    digest_a=digest(1.0),
                    digest_b=digest(1.0),
                    equal=True,
                    difference=0.0,
                ),
                TensorDiff(
                    role="output",
                    name_a="0",
                    name_b="0",
                    dtype_a="bfloat16",
                    dtype_b="float32",
                    shape_a=(64, 128),
                    shape_b=(64, 128),
                    digest_a=digest(1.0),
                    digest_b=digest(1.5),
                    equal=False,
                    difference=0.004,
                    noise=0.001,
                    elementwise=True,
                    max_abs=0.11,
                    max_rel=0.3,
                    ulp=35.0,
                    bias_ulp=0.6,
                    different=1200,
                    histogram=sample.histogram,
                    error_map=sample.error_map,
                    worst=(WorstPair(index=(60, 127), a=1.0, b=1.11, ulp=28.0),),
                ),
            ),
        )
        for row in born
    )
    by_status = Counter(STATUSES[number] for number in table.status)
    facts: dict[str, Any] = {
        "kind": "diff",
        "outcome": "DIVERGED" if born else "SAME WITHIN ROUNDING",
        "a": side("A", 2.34567, len(table)),
        "b": side("B", 2.41, len(table)),
        "mismatches": (Mismatch(what="version of torch", a="2.13.0", b="2.12.1", meaning="other rounding"),),
        "coverage": RunCoverage(
            pairs=len(table) - by_status["only a"] - by_status["only b"],
            by_match={"key": len(table) - 10, "moved": 5},
            by_status=dict(by_status),
            by_origin={"born": len(born), "inherited": by_status["differs"] - len(born)},
            only_a=by_status["only a"],
            only_b=by_status["only b"],
            tensors=3 * len(table),
            elementwise=4,
            replayed=len(born),
            not_covered=("rank 1: captured by A only",),
        ),
        "first_bit_difference": 5,
        "first_divergence": born[0] if born else None,
        "suspects": suspects,
        "table": table,
        "details": details,
        "constants": {"noise_factor": 8.0},
        "command": ("bridge", "diff", "a", "b"),
        "versions": {"torch": "2.13.0"},
        "created": "2026-01-02T03:04:05Z",
    }
    return DiffDocument(**(facts | more))


def side(label: str, loss: float, calls: int) -> Side:
    return Side(
        label=label,
        path=label.lower(),
        step=100,
        ranks=(0,),
        calls=calls,
        with_tensors=4,
        seed=1,
        dtypes=("bfloat16",),
        device="cpu",
        metrics={"loss": loss},
    )


def ab_document() -> DiffDocument:
    """A baseline and a candidate, with a verdict, a search for the step, and an overflow."""
    trace = StepTrace(
        metric="loss",
        steps=tuple(range(1, 21)),
        baseline=tuple(10.0 / i for i in range(1, 21)),
        repeat=tuple(10.0 / i * (1 + 1e-7 * (i - 1)) for i in range(1, 21)),
        candidate=tuple(10.0 / i * (1 + (1e-3 * i if i > 12 else 0)) for i in range(1, 21)),
        noise=2e-6,
        first_step=13,
    )
    overflow = NonFinite(
        side="B",
        key="layers.2.attention/op_2",
        op="aten::exp.default",
        module="layers.2.attention",
        phase="forward",
        rank=0,
        index=42,
        tensor="output 0",
        nan=0,
        pos_inf=3,
        neg_inf=0,
        elements=((3, 17), (3, 18)),
        because="exp of 104.2 exceeds the largest float16 (65504)",
        reach=44,
        source="model.py:7",
    )
    return diff_document(kind="ab", steps=(trace,), verdicts=(verdict(factor=27.3),), nonfinite=(overflow,))


def scan_document(*, drilled: bool = False) -> ScanDocument:
    """Sixty judged calls of which three fail and one could not be judged."""
    details = [
        msgspec.structs.replace(diff_document().details[0], row=0, producers_a=("x",), producers_b=("x",))
    ]
    table = call_table(3, 20, ())
    pool = [*table.pool, "output 0", "12 times its threshold", "draws random numbers"]
    rows = range(60)
    margins = [12.0 / (1 + row) if row < 3 else 0.9 - row / 100 for row in rows]
    found = [OUTCOMES.index("FAIL" if margin > 1 else "PASS") for margin in margins]
    return ScanDocument(
        verdict="FAIL",
        capture=side("A", 2.34567, 120),
        judged=59,
        by_verdict={"PASS": 56, "FAIL": 3},
        not_judged={"draws random numbers": 1, "no tensors stored": 60},
        findings=(
            ScanFinding(
                key=table.pool[table.key_a[0]],
                op="mm",
                module="layers.0.attention_norm",
                row=0,
                cause="TF32",
                evidence="3 products agree with a golden made from TF32 inputs",
                calls=3,
                next_command="bridge verify --kernel mm.py",
            ),
        ),
        table=ScanTable(
            pool=tuple(pool),
            key=[max(table.key_b[row], table.key_a[row]) for row in rows],
            op=[max(table.op_b[row], table.op_a[row]) for row in rows],
            module=table.module[:60],
            phase=table.phase[:60],
            source=table.source[:60],
            dtype=table.dtype[:60],
            tensor=[len(pool) - 3] * 60,
            reason=[len(pool) - 2 if margin > 1 else -1 for margin in margins[:-1]] + [len(pool) - 1],
            rank=[0] * 60,
            index=list(rows),
            verdict=[*found[:-1], -1],
            margin=[*margins[:-1], None],
            target_error=[*(0.001 * margin for margin in margins[:-1]), None],
            reference_error=[0.0004] * 59 + [None],
            threshold=[0.001] * 59 + [None],
            reference_relative_error=[0.0001] * 59 + [None],
        ),
        details=tuple(details) if drilled else (),
        constants={"fudge_factor": 2.0},
        seconds=12.3,
        jobs=2,
        command=("bridge", "scan", "--from", "a"),
        versions={"torch": "2.13.0"},
        created="2026-01-02T03:04:05Z",
    )
