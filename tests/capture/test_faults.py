"""Killed, interrupted, out of disk: what was written can be read, and the run is not harmed."""

from __future__ import annotations

import contextlib
import errno
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bridge.capture import lanes as lanes_module
from bridge.capture import workers as workers_module
from bridge.capture.linefile import LineFile
from bridge.capture.select import Selection
from bridge.capture.shards import Named, ShardWriter
from bridge.capture.store import Capture, load_capture
from bridge.capture.tracer import Tracer

CaptureOf = Callable[..., Capture]

PROGRAM = """
import signal, sys, time
import torch
from bridge.capture.select import Selection
from bridge.capture.tracer import Tracer
tracer = Tracer(None, out=sys.argv[1], step=1, selection=Selection(patterns=("*",)))
with tracer:
    x = torch.ones(64, 64)
    for i in range(100_000):
        x = x * 1.0001 + 1
        if i == 1000:
            print("going", flush=True)
"""


def interrupted(out: Path, how: signal.Signals) -> subprocess.CompletedProcess[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "going\n"
    process.send_signal(how)
    stdout, stderr = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_process_leaves_what_it_wrote(how: signal.Signals, tmp_path: Path) -> None:
    done = interrupted(tmp_path / "c", how)
    assert done.returncode != 0
    capture = load_capture(tmp_path / "c")
    assert not capture.complete
    assert capture.problems
    assert len(capture.calls) > 500
    stored = [call for call in capture.calls if any(r.blob for r in call.inputs)]
    assert len(stored) > 100
    for call in (stored[0], stored[-1]):
        assert capture.tensors(call)["inputs/0"].shape == (64, 64)
    digested = sum(r.digest is not None for call in capture.calls for r in call.inputs)
    assert digested > 500
    # Nobody holds the folder any more: another capture may take its place.
    tracer = Tracer(None, out=tmp_path / "c", step=2, force=True)
    with tracer:
        torch.ones(2) + 1
    assert load_capture(tracer.finish()).complete


def test_few_calls_reach_the_disk_before_the_step_ends(tmp_path: Path) -> None:
    tracer = Tracer(None, out=tmp_path / "c", step=1)
    with tracer:
        x = torch.ones(2) + 1
        time.sleep(0.3)
        x = x + 1
        deadline = time.monotonic() + 30
        while (
            not (tmp_path / "c" / "rank_00000" / "calls.jsonl").stat().st_size and time.monotonic() < deadline
        ):
            time.sleep(0.02)
        assert 2 <= len(load_capture(tmp_path / "c").calls) <= 3
    tracer.finish()


@pytest.mark.parametrize("reserve", [0, workers_module.DISK_RESERVE])
def test_a_full_disk(reserve: int, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "DISK_RESERVE", reserve)
    x = torch.randn(1000, 100)
    tracer = Tracer(None, out=small_disk / "c", step=1, selection=Selection(patterns=("*",)))
    with tracer:
        for _ in range(10):
            x = x + 1
    capture = load_capture(tracer.finish())
    assert len(capture.calls) == 10
    assert capture.manifest.dropped
    assert all("disk" in d.reason or "writing failed" in d.reason for d in capture.manifest.dropped)
    for call in capture.calls:
        capture.tensors(call)


def test_a_shard_that_cannot_be_begun_leaves_nothing(small_disk: Path) -> None:
    with (small_disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    (small_disk / "filler").write_bytes(bytes((2 << 20) - (32 << 10)))  # room for half a header
    writer = ShardWriter(small_disk)
    lines, error = writer.append([Named("0" * 32, "float32", (2,), bytes(8))])
    writer.close()
    assert (lines, writer.closed) == ([], {})
    assert isinstance(error, OSError) and error.errno == errno.ENOSPC
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


@pytest.mark.parametrize("name", ["calls", "contents"])
def test_files_that_cannot_be_written_do_not_stop_the_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LineFile.append

    def fail(self: Any, data: bytes) -> None:
        if self.path.name == f"{name}.jsonl":
            raise OSError(28, "No space left on device")
        real(self, data)

    monkeypatch.setattr(LineFile, "append", fail)
    tracer = Tracer(None, out=tmp_path / "c", step=1, selection=Selection(patterns=("*",)))
    with tracer:
        result = torch.ones(3) + 1
    tracer.finish()
    assert result.tolist() == [2, 2, 2]
    manifest = load_capture(tmp_path / "c").manifest
    assert any(f"{name} could not be written" in text for text in manifest.problems)


@pytest.mark.parametrize("numbers", [100, 10_000])
def test_back_pressure_bounds_what_waits(
    numbers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors smaller and larger than a chunk, written more slowly than they are made."""
    pools = []

    def slow(self: Any, load: Any, blobs: Any) -> Any:
        pools.append(load.pool)
        time.sleep(0.01)
        return load.bytes()

    monkeypatch.setattr(workers_module.Workers, "_arrived", slow)
    monkeypatch.setattr(lanes_module, "HOST_CHUNK", 4096)
    monkeypatch.setattr(lanes_module, "WAITING_BYTES", 16384)
    tracer = Tracer(None, out=tmp_path / "c", step=1, selection=Selection(patterns=("*",)))
    with tracer:
        x = torch.randn(numbers)
        for _ in range(12):
            x = x + 1
    capture = load_capture(tracer.finish())
    assert capture.complete
    assert torch.equal(capture.tensors(capture.calls[-1])["outputs/0"], x)
    assert max(pool.most_taken for pool in pools) <= 4


def test_values_that_are_not_finite(capture_of: CaptureOf) -> None:
    x = torch.tensor([1.0, float("nan"), float("inf")])
    capture = capture_of(None, lambda: (x * 2).masked_fill(x > 3, float("-inf")))
    (fill,) = capture.find("masked_fill")
    assert fill.attrs["value"] == {"float": "-inf"}
    digest = capture.find("mul")[0].outputs[0].digest
    assert digest is not None
    assert (digest.nan, digest.pos_inf, digest.max) == (1, 1, 2.0)


def test_an_operator_that_returns_nothing(capture_of: CaptureOf) -> None:
    values = [torch.ones(2), torch.ones(3)]
    capture = capture_of(None, lambda: torch._foreach_add_(values, 1.0))
    (call,) = capture.find("_foreach_add_")
    assert [capture.tensor(r).tolist() for r in call.outputs] == [[2, 2], [2, 2, 2]]
    assert call.mutated == ("0.0", "0.1")


def test_a_tensor_subclass_that_nobody_knows(capture_of: CaptureOf) -> None:
    class Boxed(torch.Tensor):
        inner: torch.Tensor

        @staticmethod
        def __new__(cls, inner: torch.Tensor) -> Boxed:
            boxed = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
            boxed.inner = inner
            return boxed

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            plain = [a.inner if isinstance(a, Boxed) else a for a in args]
            return Boxed(func(*plain, **(kwargs or {})))

    class Tagged(torch.Tensor):
        pass

    def action() -> None:
        result = Boxed(torch.ones(3)) + 1
        assert result.inner.tolist() == [2, 2, 2]
        assert (torch.ones(3).as_subclass(Tagged) + 1).tolist() == [2, 2, 2]

    capture = capture_of(None, action)
    assert capture.complete, capture.problems
    outer = [c for c in capture.find("add") if any(r.subclass == "Boxed" for r in c.inputs)]
    inner = [c for c in capture.find("add") if c.parent == outer[0].index]
    assert outer[0].outputs[0].subclass == "Boxed"
    assert capture.tensor(inner[0].outputs[0]).tolist() == [2, 2, 2]


def test_sparse_quantized_and_meta_tensors_are_recorded_without_bytes(capture_of: CaptureOf) -> None:
    dense = torch.eye(3)

    def action() -> None:
        sparse = dense.to_sparse()
        (sparse + sparse).to_dense()
        torch.ones(3, device="meta") + 1
        torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8).dequantize()

    capture = capture_of(None, action)
    assert capture.complete, capture.problems
    assert any(r.digest is None for c in capture.calls for r in c.outputs)


def test_functorch_and_inference_mode(capture_of: CaptureOf) -> None:
    linear = nn.Linear(3, 3)

    def action() -> None:
        with torch.inference_mode():
            linear(torch.ones(2, 3))
        torch.func.grad(lambda x: (x**2).sum())(torch.ones(3))
        torch.vmap(lambda x: x * 2)(torch.ones(2, 3))

    capture = capture_of(linear, action)
    assert capture.complete, capture.problems
