"""Columns of calls that are decoded batch by batch are those of calls that are all there."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import msgspec
import numpy as np
import pytest
from recorded import Recorder

from bridge.capture import stored
from bridge.capture.record import Call, TensorRecord
from bridge.capture.store import load_capture
from bridge.capture.tracer import Tracer
from bridge.errors import CorruptCaptureError
from bridge.verify.columns import Columns, Pool, Tensors
from bridge.verify.intake import columns
from tests.capture.conftest import Trainer
from tests.capture.test_stored import write


def same(left: Columns, right: Columns) -> None:
    """Every number of two columns of one pool."""
    for field in fields(Columns):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if isinstance(a, Tensors):
            for part in fields(Tensors):
                x, y = getattr(a, part.name), getattr(b, part.name)
                np.testing.assert_array_equal(x, y, err_msg=f"{field.name}.{part.name}")
        elif isinstance(a, np.ndarray):
            np.testing.assert_array_equal(a, b, err_msg=field.name)


@pytest.mark.parametrize("batch", [1, 4000, 1 << 20], ids=["a call", "a few", "all"])
def test_batches_do_not_show(batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "BATCH", batch)
    trainer = Trainer()
    with Tracer(trainer.model, out=tmp_path / "c", step=1):
        trainer.step()
    capture = load_capture(tmp_path / "c")
    lazily = stored.stored_calls(capture)
    assert isinstance(lazily, stored.StoredCalls)
    pool = Pool()
    same(columns(lazily, pool), columns(capture.calls, pool))


def test_an_impossible_layout_is_refused_on_the_way(tmp_path: Path) -> None:
    record = TensorRecord(name="0", dtype="float32", shape=(2,), stride=(-1,))
    call = Call(index=0, key="bad", kind="module", op="M", step=1, grad_inputs=(record,))
    capture = write(tmp_path / "c", {0: [call]}, [])
    with pytest.raises(CorruptCaptureError, match="call 'bad' has a tensor '0' with an impossible"):
        columns(stored.stored_calls(capture), Pool())


def test_shapes_are_told_apart_by_all_outputs_in_order() -> None:
    def call(index: int, *shapes: tuple[int, ...], dtype: str = "float32") -> Call:
        records = [TensorRecord(name=str(i), dtype=dtype, shape=shape) for i, shape in enumerate(shapes)]
        return Call(index=index, key=f"k{index}", kind="op", op="aten::x", step=1, outputs=tuple(records))

    calls = [
        call(0, (2,), (3,)), call(1, (3,), (2,)), call(2, (2,)), call(3), call(4, (2,), (3,)),
        call(5, (2,), (3,), dtype="bfloat16"), call(6, (2,), (3,), (3,)), call(7, ()),
    ]  # fmt: skip
    found = columns(calls, Pool())
    assert len(set(found.shapes.tolist())) == 6
    assert found.shapes[0] == found.shapes[4] == found.shapes[5]
    assert found.signature[0] == found.signature[4] != found.signature[5]
    # Both runs share a pool, and see shapes in another order.
    pool = Pool()
    one, two = columns(calls, pool), columns(calls[::-1], pool)
    assert one.shapes.tolist() == two.shapes[::-1].tolist()
    assert one.signature.tolist() == two.signature[::-1].tolist()


def test_what_calls_are_told_is_compared_by_value() -> None:
    def call(index: int, **attrs: object) -> Call:
        return Call(index=index, key=f"k{index}", kind="op", op="aten::x", step=1, attrs=attrs)

    calls = [call(0, a=1, b=2), call(1, b=2, a=1), call(2, a=1), call(3), call(4, a=1 << 80), call(5)]
    told = columns(calls, Pool()).told.tolist()
    assert told[0] == told[1] and told[3] == told[5] and len(set(told)) == 4


def test_no_calls_and_calls_without_tensors() -> None:
    assert len(columns([], Pool())) == 0
    rec = Recorder()
    bare = msgspec.structs.replace(
        Call(index=0, key="k", kind="op", op="aten::x", step=1), attrs={"x": float("nan")}
    )
    assert len(columns([bare, *rec.calls], Pool()).reads.call) == 0
