"""A tensor judged block by block gets the verdict that it gets as a whole, number by number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from bridge.verify.companions import Compared
from bridge.verify.compare import Trio, judge_tensor
from bridge.verify.envelope import Envelope
from bridge.verify.local import as_matrix, cell_of
from bridge.verify.stream import Asked, Stream
from bridge.verify.verdict import Constants, TensorVerdict

WIDE = torch.float64


def _made(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Trio, Envelope]:
    generator = torch.Generator().manual_seed(7)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(shape, generator=generator, dtype=WIDE)

    golden = normal(1.0) * torch.logspace(-3, 1, shape[0], dtype=WIDE).reshape(-1, *[1] * (len(shape) - 1))
    off = 2.0**-23
    draws = [golden * (1 + normal(off)) for _ in range(3)]
    reference, target = (golden * (1 + normal(off))).to(dtype), (golden * (1 + normal(off))).to(dtype)
    return Trio(golden=golden, reference=reference, target=target), Envelope.of(draws, golden, dtype)


def _streamed(trio: Trio, envelope: Envelope, *, axis: int, height: int, **how: Any) -> TensorVerdict:
    golden, reference, target = trio.golden, trio.reference, trio.target
    assert golden is not None and reference is not None and target is not None
    tiles, elementwise = how.get("tiles", ()), how.get("elementwise", False)

    def compared(start: int, count: int, typical: Any) -> Compared:
        def part(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.narrow(axis, start, count)

        return Compared(
            golden=part(golden),
            reference=part(reference).to(WIDE),
            target=part(target).to(WIDE),
            keep=torch.ones_like(part(target), dtype=torch.bool),
            dtype=target.dtype,
            envelope=Envelope(rms=part(envelope.rms), draws=[part(d) for d in envelope.draws]),
            elementwise=elementwise,
            typical=typical,
        )

    whole = compared(0, golden.shape[axis], None)
    whole.keep = torch.isfinite(whole.golden) & torch.isfinite(whole.target) & torch.isfinite(whole.reference)
    rows, cols = as_matrix(golden).shape
    cell = cell_of(rows, cols, tiles)
    typical = None
    if not elementwise:
        wanted = (None,) if cell is None else (None, cell[1])
        typical = {tile: float(whole.relative(tile).median()) for tile in wanted}
    asked = Asked(
        name="y",
        case="case",
        shape=tuple(golden.shape),
        dtype=target.dtype,
        device=golden.device,
        axis=axis,
        constants=Constants(),
        nonfinite_inputs=how.get("nonfinite_inputs", False),
        tiles=tiles,
    )
    stream = Stream(asked)
    for start in range(0, golden.shape[axis], height):
        stream.add(start, compared(start, min(height, golden.shape[axis] - start), typical))
    return stream.verdict()


def _agree(one: Any, other: Any, path: str = "") -> None:
    """Equal, sums to a relative 1e-11."""
    if isinstance(one, float) and isinstance(other, float):
        assert one == pytest.approx(other, rel=1e-11, abs=0.0), path
    elif isinstance(one, dict):
        assert list(one) == list(other), path
        for key, value in one.items():
            _agree(value, other[key], f"{path}.{key}")
    elif isinstance(one, tuple | list):
        assert len(one) == len(other), path
        for place, (a, b) in enumerate(zip(one, other, strict=True)):
            _agree(a, b, f"{path}[{place}]")
    else:
        assert one == other, path


def _same(trio: Trio, envelope: Envelope, *, axis: int, height: int, **how: Any) -> TensorVerdict:
    whole = judge_tensor(
        "y",
        "case",
        trio,
        constants=Constants(),
        envelope=replace(envelope),
        elementwise=how.get("elementwise", False),
        nonfinite_inputs=how.get("nonfinite_inputs", False),
        tiles=how.get("tiles", ()),
    )
    _agree(_in_order(_streamed(trio, envelope, axis=axis, height=height, **how)), _in_order(whole))
    return whole


def _in_order(verdict: TensorVerdict) -> Any:
    """As plain data; of elements that are equally far off, which comes first is left open."""
    data = msgspec.to_builtins(verdict)
    data["worst"] = sorted(
        data["worst"], key=lambda element: (-(element["error"] or float("inf")), element["index"])
    )
    return data


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("shape", "axis", "height"),
    [((60, 70), 0, 7), ((5, 50, 33), 1, 9), ((50, 3, 33), 0, 16), ((64, 1), 0, 5)],
)
def test_blocks_add_up_to_the_whole(
    shape: tuple[int, ...], axis: int, height: int, dtype: torch.dtype
) -> None:
    trio, envelope = _made(shape, dtype)
    assert _same(trio, envelope, axis=axis, height=height, tiles=(16,)).verdict == "PASS"


def test_one_long_row_of_an_elementwise_kernel() -> None:
    trio, envelope = _made((5000,), torch.float16)
    assert _same(trio, envelope, axis=0, height=301, elementwise=True, tiles=(128,)).verdict == "PASS"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_fault_at_the_edge_of_a_block_is_found_in_the_same_place(dtype: torch.dtype) -> None:
    trio, envelope = _made((60, 70), dtype)
    assert trio.target is not None
    trio.target[27:29, 69] += 1.0
    found = _same(trio, envelope, axis=0, height=7, tiles=(16,))
    assert found.verdict == "FAIL"
    assert {element.index for element in found.worst[:2]} == {(27, 69), (28, 69)}


@pytest.mark.parametrize("place", [(6, 3), (7, 0), (59, 69)])
def test_what_is_not_finite_is_counted_over_all_blocks(place: tuple[int, int]) -> None:
    trio, envelope = _made((60, 70), torch.float16)
    assert trio.golden is not None and trio.reference is not None and trio.target is not None
    trio.target[place] = float("inf")
    trio.target[50, 5:7] = float("nan")
    found = _same(trio, envelope, axis=0, height=7)
    assert found.structure is not None and found.structure.startswith("3 of 4200 elements")
    for tensor in (trio.golden, trio.reference):
        tensor[50, 5:7] = float("nan")
    assert "first at " + str(place) in str(_same(trio, envelope, axis=0, height=7).structure)
    trio.target[place] = trio.reference[place]
    assert _same(trio, envelope, axis=0, height=7, nonfinite_inputs=True).verdict == "PASS"
