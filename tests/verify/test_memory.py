"""How much memory the judgement of one case holds at once."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bridge.verify import KernelSpec, judge
from bridge.verify.case import Case
from bridge.verify.execute import Result, run_target
from bridge.verify.judge import constants_of, judge_case
from bridge.verify.options import Options
from bridge.verify.plan import plan_cases
from tests.verify.corpus import norms
from tests.verify.corpus.pairs import full, fused, normal

PLAIN = Options(sweeps=False, power=False, repeats=1)


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that ops returned and that are still alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for item in tree_leaves(out):
            if isinstance(item, torch.Tensor):
                self._count(item.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._known:
            return
        size = storage.nbytes()
        self._known.add(storage._cdata)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, storage._cdata, size)

    def _freed(self, known: int, size: int) -> None:
        self._known.discard(known)
        self.now -= size


def _norm(dtype: str, rows: int) -> tuple[KernelSpec, Case]:
    spec = replace(norms.PAIRS[0].make(False), shapes=((rows, 1024),), dtypes=(dtype,))
    return spec, plan_cases(spec, options=PLAIN)[0]


def _bytes(case: Case) -> int:
    return max(t.numel() * t.element_size() for t in case.inputs)


@pytest.mark.parametrize(("dtype", "most"), [("float16", 22), ("float32", 18)])
def test_the_judgement_of_one_case_holds_a_bounded_number_of_fp64_copies(dtype: str, most: int) -> None:
    """FP64 golden with its backward, the envelope's sums and one comparison; no draw at full width."""
    spec, case = _norm(dtype, 256)
    live = Live()
    with live:
        judged = judge_case(spec, case, constants=constants_of(spec), options=PLAIN)
    assert judged is not None and judged.record.verdict == "PASS"
    copies = live.peak / (8 * case.inputs[0].numel())
    assert copies < most, f"{copies:.1f} FP64 copies of the largest input"


class Phases:
    """Most bytes alive while the reference ran, and while anything else did, in units of the largest input.

    The target is an eager formula here; what it makes itself is no part of either.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, live: Live, unit: int) -> None:
        self._live, self._unit = live, unit
        self.reference = self.judging = 0.0
        run, run_target = judge.run, judge.run_target

        def reference(*args: Any, **kwargs: Any) -> Any:
            self._see()
            found = run(*args, **kwargs)
            self.reference = max(self.reference, self._peak())
            return found

        def target(*args: Any, **kwargs: Any) -> Any:
            self._see()
            found = run_target(*args, **kwargs)
            self._peak()
            return found

        monkeypatch.setattr(judge, "run", reference)
        monkeypatch.setattr(judge, "run_target", target)

    def _peak(self) -> float:
        peak = self._live.peak / self._unit
        self._live.peak = self._live.now
        return peak

    def _see(self) -> None:
        self.judging = max(self.judging, self._peak())

    def end(self) -> None:
        self._see()


@pytest.mark.parametrize(("dtype", "reference", "judging"), [("float16", 18, 10), ("float32", 11, 9)])
def test_a_large_case_holds_less_than_twelve_times_its_largest_input_beside_the_reference(
    monkeypatch: pytest.MonkeyPatch, dtype: str, reference: float, judging: float
) -> None:
    """Inputs and upstream gradient, both results, and golden and noise of one block of rows."""
    spec, case = _norm(dtype, 512)
    options = replace(PLAIN, large_bytes=1 << 19)
    live = Live()
    phases = Phases(monkeypatch, live, _bytes(case))
    with live:
        judged = judge_case(spec, case, constants=constants_of(spec), options=options)
    phases.end()
    assert judged is not None and judged.record.verdict == "PASS"
    assert phases.reference < reference, phases.reference
    assert phases.judging < judging, phases.judging


def test_the_target_is_run_with_one_copy_of_its_inputs_and_two_of_its_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside the case, which `Live` counts once it was copied: x, y, the upstream gradient, and gradients."""
    monkeypatch.setattr("bridge.verify.bits._PIECE", 1 << 12)
    spec = KernelSpec(
        name="double",
        reference=lambda x: 2 * x,
        target=fused(lambda x: (x + x, None), lambda saved, grad: grad + grad),
        sample=normal(full),
        inputs=("x",),
        grads=("x",),
        outputs=("y",),
        kind="elementwise",
        shapes=((256, 1024),),
        dtypes=("float32",),
    )
    case = plan_cases(spec, options=PLAIN)[0]
    live = Live()
    with live:
        result = run_target(spec, case, twice=True)
    assert isinstance(result, Result) and not result.faults
    assert live.peak / _bytes(case) < 2 + 2 + 1 + 2 + 0.3, live.peak / _bytes(case)
