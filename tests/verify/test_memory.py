"""How much memory the judgement of one case holds at once."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bridge.verify.judge import constants_of, judge_case
from bridge.verify.options import Options
from bridge.verify.plan import plan_cases
from tests.verify.corpus import norms

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


@pytest.mark.parametrize(("dtype", "most"), [("float16", 22), ("float32", 18)])
def test_the_judgement_of_one_case_holds_a_bounded_number_of_fp64_copies(dtype: str, most: int) -> None:
    """FP64 golden with its backward, the envelope's sums and one comparison; no draw at full width."""
    spec = replace(norms.PAIRS[0].make(False), shapes=((256, 1024),), dtypes=(dtype,))
    case = plan_cases(spec, options=PLAIN)[0]
    live = Live()
    with live:
        judged = judge_case(spec, case, constants=constants_of(spec), options=PLAIN)
    assert judged is not None and judged.record.verdict == "PASS"
    copies = live.peak / (8 * case.inputs[0].numel())
    assert copies < most, f"{copies:.1f} FP64 copies of the largest input"
