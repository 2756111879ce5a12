"""What is stored is what was there when it was recorded, whatever happens to the memory next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bridge.capture import lanes
from bridge.capture.select import Selection
from bridge.capture.store import Capture, load_capture
from bridge.capture.tracer import Tracer

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def captured(out: Path, work: Any) -> Capture:
    tracer = Tracer(None, out=out, step=1, selection=Selection(patterns=("*",)))
    with tracer:
        work()
    capture = load_capture(tracer.finish())
    assert capture.complete
    assert not capture.manifest.dropped
    return capture


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tensors of a few kilobytes pass in parts, and waiting memory is soon used up."""
    monkeypatch.setattr(lanes, "HOST_CHUNK", 8192)
    monkeypatch.setattr(lanes, "DEVICE_CHUNK", 8192)
    monkeypatch.setattr(lanes, "WAITING_BYTES", 4 * 8192)


def raw(tensor: torch.Tensor) -> list[int]:
    """The bytes of the elements in row-major order."""
    numbers: list[int] = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).tolist()
    return numbers


@pytest.mark.parametrize("device", DEVICES)
def test_written_over_and_freed_right_after(device: str, tmp_path: Path) -> None:
    def work() -> None:
        x = torch.arange(5000.0, device=device)  # 20 kB: three chunks
        for step in range(40):
            y = x + step
            y.mul_(-1)  # at once, in place
            del y  # and the next one gets its memory

    found = captured(tmp_path / "c", work)
    sums = [found.tensors(call)["outputs/0"] for call in found.calls if call.op.startswith("aten::add")]
    products = [found.tensors(call)["outputs/0"] for call in found.calls if call.op.startswith("aten::mul_")]
    assert len(sums) == len(products) == 40
    for step in range(40):
        assert torch.equal(sums[step], torch.arange(5000.0) + step)
        assert torch.equal(products[step], -torch.arange(5000.0) - step)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "complex64", "float8_e4m3fn", "int64"])
def test_every_type_and_layout(dtype: str, device: str, tmp_path: Path) -> None:
    base = (torch.randn(64, 130, device=device) * 4).to(getattr(torch, dtype))
    views = [base, base.t(), base[:, 3:9], base[1::2], base[0, 5], base[:0], base[:1].expand(7, 130)]
    found = captured(tmp_path / "c", lambda: [view.clone() for view in views])
    clones = [call for call in found.calls if call.op.startswith("aten::clone")]
    assert len(clones) == len(views)
    for call, view in zip(clones, views, strict=True):
        tensor = found.tensors(call)["inputs/0"]
        assert tensor.stride() == view.stride()
        assert raw(tensor) == raw(view)


@pytest.mark.gpu
def test_streams_of_the_step(tmp_path: Path) -> None:
    other: Any = torch.cuda.Stream()

    def work() -> None:
        x = torch.ones(3000, device="cuda")
        for step in range(20):
            now, before = torch.cuda.default_stream(), other
            if step % 2:
                now, before = other, torch.cuda.default_stream()
            now.wait_stream(before)
            with torch.cuda.stream(now):
                x = x * 1.5
                x.record_stream(before)

    found = captured(tmp_path / "c", work)
    outputs = [found.tensors(call)["outputs/0"] for call in found.calls if call.op.startswith("aten::mul")]
    expected = [torch.ones(())]
    for _ in range(20):
        expected.append(expected[-1] * 1.5)
    assert [float(output[0]) for output in outputs] == [float(x) for x in expected[1:]]
    assert all(bool((output == output[0]).all()) for output in outputs)


def test_equal_bytes_are_written_once(tmp_path: Path) -> None:
    found = captured(tmp_path / "c", lambda: [torch.full((3000,), 2.0) for _ in range(10)])
    blobs = {record.blob for call in found.calls for record in call.outputs}
    assert len(blobs) == 1
    assert found.manifest.stored_bytes == 12000


def test_the_digest_of_a_stored_tensor_is_that_of_a_digested_one(tmp_path: Path) -> None:
    x, y = torch.randn(1000), torch.randn(3, 1500)

    def work() -> None:
        (x * 2).sum()
        y.t().exp()

    stored = captured(tmp_path / "stored", work)
    tracer = Tracer(None, out=tmp_path / "digests", step=1)
    with tracer:
        work()
    digests = load_capture(tracer.finish())
    for left, right in zip(stored.calls, digests.calls, strict=True):
        for a, b in zip((*left.inputs, *left.outputs), (*right.inputs, *right.outputs), strict=True):
            assert a.digest == b.digest
            assert a.digest is not None
