"""Rates of four judges over the corpus of wrong kernels and twins, as a Markdown table on stdout.

    python scripts/bench_gates.py

Columns: torch.allclose at its defaults, rtol = atol = 1e-2, the plain gate, and the whole judgement. The
first three see the declared shapes only, as a unit test would; seed 0.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bridge.verify import KernelSpec
from bridge.verify.execute import Result, run
from bridge.verify.gate import measure
from bridge.verify.golden import run_golden
from bridge.verify.judge import constants_of, judge
from bridge.verify.options import Options
from bridge.verify.plan import plan_cases
from tests.verify.corpus import benign, losses, norms, pointwise, slips, state


def flags(spec: KernelSpec) -> tuple[bool, bool, bool, bool]:
    """Whether allclose, loose allclose, the plain gate and the judgement flag this kernel."""
    close = loose = gate = False
    for case in plan_cases(spec, options=Options(sweeps=False)):
        eager, target, golden = (
            run(spec.reference, spec, case),
            run(spec.target, spec, case),
            run_golden(spec, case),
        )
        assert isinstance(eager, Result) and isinstance(target, Result)
        for name, want in eager.named().items():
            got, true = target.named()[name], golden.named()[name]
            if want is None or got is None or true is None or not want.is_floating_point():
                continue
            close |= not torch.allclose(got, want)
            loose |= not torch.allclose(got, want, rtol=1e-2, atol=1e-2)
            wide = (true.double(), want.double(), got.double())
            gate |= not measure(*wide, dtype=want.dtype, constants=constants_of(spec)).passes
    options = Options(power=False)
    return (
        close,
        loose,
        gate,
        judge(spec, plan_cases(spec, options=options), options=options).outcome == "FAIL",
    )


def main() -> None:
    """Print one row per kernel and the totals."""
    torch.set_num_threads(1)
    pairs = (*norms.PAIRS, *losses.PAIRS, *pointwise.PAIRS, *slips.PAIRS, *state.PAIRS, *slips.SWEPT)
    wrong = [(pair.name, flags(pair.make(True))) for pair in pairs]
    right = [(pair.name, flags(pair.make(False))) for pair in pairs] + [
        (m.__name__, flags(m())) for m in benign.BENIGN
    ]
    print("| kernel | allclose | 1e-2 | plain gate | bridge |\n|---|---|---|---|---|")
    for title, rows in (("wrong", wrong), ("right", right)):
        for name, seen in rows:
            print(f"| {title}: {name} | " + " | ".join("flags" if f else "-" for f in seen) + " |")
        totals = [sum(seen[i] for _, seen in rows) for i in range(4)]
        print(f"| **{title}, flagged of {len(rows)}** | " + " | ".join(map(str, totals)) + " |")


if __name__ == "__main__":
    main()
