"""How much memory the judgement of one case holds at once."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bridge.verify import KernelSpec
from bridge.verify.case import Case
from bridge.verify.execute import Result, run_target
from bridge.verify.judge import constants_of, judge_case
from bridge.verify.options import Options
from bridge.verify.plan import plan_cases
from tests.verify.corpus import norms
from tests.verify.corpus.pairs import full, fused, normal

PLAIN = Options(sweeps=False, power=False, repeats=1)


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that ops returned and that are still alive, shared memory once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: dict[int, range] = {}  #: addresses by storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for item in tree_leaves(out):
            if isinstance(item, torch.Tensor):
                self._count(item.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        size, start = storage.nbytes(), storage.data_ptr()
        if storage._cdata in self._known or any(start in known for known in self._known.values()):
            return
        self._known[storage._cdata] = range(start, start + size)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, storage._cdata, size)

    def _freed(self, known: int, size: int) -> None:
        del self._known[known]
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


def _softmax() -> KernelSpec:
    def reference(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x.float(), -1).to(x.dtype)

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.empty_like(x)
        for into, rows in zip(y, x, strict=True):
            into.copy_(torch.softmax(rows.float(), -1))
        return y, x

    def backward(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        found = torch.empty_like(x)
        for into, row, g in zip(found, x, grad, strict=True):
            p = torch.softmax(row.float(), -1)
            into.copy_(p * (g.float() - (p * g.float()).sum()))
        return found

    return _lean("softmax", reference, forward, backward, ("x",), "reduction")


def _gated() -> KernelSpec:
    silu = torch.nn.functional.silu

    def reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return (silu(gate.float()) * up.float()).to(gate.dtype)

    def forward(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, Any]:
        y = torch.empty_like(gate)
        for into, g, u in zip(y, gate, up, strict=True):
            into.copy_(silu(g.float()) * u.float())
        return y, (gate, up)

    def backward(saved: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = torch.empty_like(grad), torch.empty_like(grad)
        for to_gate, to_up, g, u, d in zip(*found, *saved, grad, strict=True):
            sigma = torch.sigmoid(g.float())
            to_up.copy_(d.float() * g.float() * sigma)
            to_gate.copy_(d.float() * u.float() * sigma * (1 + g.float() * (1 - sigma)))
        return found

    return _lean("gated", reference, forward, backward, ("gate", "up"), "elementwise")


def _norm_by_rows() -> KernelSpec:
    spec = norms.PAIRS[0].make(False)

    def forward(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, Any]:
        y = torch.empty_like(x)
        for into, row in zip(y, x, strict=True):
            into.copy_(spec.reference(row, weight, **spec.attrs))
        return y, (x, weight)

    def backward(saved: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = saved
        to_x, to_weight = torch.empty_like(x), torch.zeros_like(weight, dtype=torch.float32)
        for into, row, g in zip(to_x, x, grad, strict=True):
            leaves = row.float().requires_grad_(), weight.float().requires_grad_()
            with torch.enable_grad():
                found = torch.autograd.grad(spec.reference(*leaves, **spec.attrs), leaves, g.float())
            into.copy_(found[0])
            to_weight += found[1]
        return to_x, to_weight.to(weight.dtype)

    function = fused(forward, backward)
    return replace(spec, target=lambda x, weight, eps: function(x, weight))


def _lean(
    name: str, reference: Any, forward: Any, backward: Any, inputs: tuple[str, ...], kind: Any
) -> KernelSpec:
    return KernelSpec(
        name=name,
        reference=reference,
        target=fused(forward, backward),
        sample=normal(*(full for _ in inputs)),
        inputs=inputs,
        grads=inputs,
        outputs=("y",),
        kind=kind,
        shapes=((256, 1024),),
        dtypes=("float16", "float32"),
    )


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("make", [_norm_by_rows, _softmax, _gated])
def test_a_large_case_holds_at_most_twelve_times_its_largest_input(
    monkeypatch: pytest.MonkeyPatch, make: Any, dtype: str
) -> None:
    """Reference, target with its repeats, golden and noise; the target makes its results a row at a time."""
    monkeypatch.setattr("bridge.verify.bits._PIECE", 1 << 12)
    spec = replace(make(), shapes=((256, 1024),), dtypes=(dtype,))
    case = plan_cases(spec, options=PLAIN)[0]
    options = replace(PLAIN, large_bytes=1 << 18, repeats=3)
    monkeypatch.setattr("bridge.verify.interleaved._LARGEST", 1 << 17)
    monkeypatch.setattr("bridge.verify.memory._LARGE", 1 << 17)
    live = Live()
    with live:
        judged = judge_case(spec, case, constants=constants_of(spec), options=options)
    assert judged is not None and judged.record.verdict == "PASS"
    assert any(note.startswith("golden and noise were made in ") for note in judged.record.notes)
    assert live.peak / _bytes(case) < 12, live.peak / _bytes(case)


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
