"""The GPU's digest walk, in Triton's interpreter, and on a GPU where there is one."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from bridge.capture import device as device_module
from bridge.capture import digest_host
from bridge.capture.device import DeviceDigests
from bridge.capture.identity import place_of
from bridge.capture.record import Digest

pytest.importorskip("triton")

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="the interpreter is off: a GPU runs these kernels"
)


def cases(device: str, counts: tuple[int, ...], dtypes: tuple[str, ...]) -> list[tuple[torch.Tensor, str]]:
    found = []
    generator = torch.Generator().manual_seed(0)
    for dtype in dtypes:
        for count in counts:
            x = 5 * torch.randn(count, generator=generator)
            if count == 7 and "float" in dtype:
                x[2], x[3], x[4] = float("nan"), float("inf"), -float("inf")
            if count == 1024:
                x *= {"float32": 1e30, "bfloat16": 1e-20}.get(dtype, 1.0)
            found.append((x.to(getattr(torch, dtype)).to(device), dtype))
    found.append((torch.randn(40, 30, generator=generator)[:, 3:9].to(device), "float32"))
    found.append((torch.randn(90, 30, generator=generator).to(device)[:, 3:9], "float32"))
    found.append((torch.randn(50, generator=generator).bfloat16().to(device)[1:], "bfloat16"))
    found.append((torch.randn(5, 7, generator=generator).to(device).t(), "float32"))
    return found


def check(items: list[tuple[torch.Tensor, str]], digests: dict[int, Digest]) -> None:
    for number, (x, dtype) in enumerate(items):
        plain = x.t() if len(x.shape) == 2 and x.stride(0) == 1 else x
        host = plain.cpu().contiguous()
        wanted, found = digest_host.digest_bytes(host.data_ptr(), host.numel(), dtype), digests[number]
        assert found.hash == wanted.hash, (number, dtype, x.shape)
        for name in ("count", "nan", "pos_inf", "neg_inf", "min", "max"):
            assert getattr(found, name) == getattr(wanted, name), (number, dtype, name)
        assert abs(found.sum - wanted.sum) <= 1e-6 * wanted.abs_sum
        assert abs(found.sq_sum - wanted.sq_sum) <= 1e-5 * wanted.sq_sum


@interpreted
def test_interpreted_walk_agrees_with_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "MOST_CHUNKS", 2)
    digests = DeviceDigests(torch.device("cpu"))
    items = cases("cpu", (1, 7, 1024), ("float32", "bfloat16", "float16", "int64", "bool", "float8_e4m3fn"))
    items.append((torch.randn(40_000), "float32"))
    for number, (x, dtype) in enumerate(items):
        digests.add(number, x, place_of(x, dtype))
    check(items, dict(digests.collect()))


@interpreted
def test_chunks_are_added_up_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "CHUNKS", 4)
    monkeypatch.setattr(device_module, "MOST_CHUNKS", 2)
    digests = DeviceDigests(torch.device("cpu"))
    items = cases("cpu", (3, 7), ("float32", "int32"))
    items.append((torch.randn(40_000), "float32"))
    for number, (x, dtype) in enumerate(items):
        digests.add(number, x, place_of(x, dtype))
    check(items, dict(digests.collect()))


@pytest.mark.gpu
def test_gpu_walk_agrees_with_the_host() -> None:
    digests = DeviceDigests(torch.device("cuda", 0))
    dtypes = ("float32", "float64", "bfloat16", "float16", "int64", "int32", "int16", "uint8", "int8", "bool",
              "float8_e4m3fn", "float8_e5m2", "complex64")  # fmt: skip
    items = cases("cuda", (1, 7, 1024, 65_536, 1_000_003), dtypes)
    items.append((torch.randn(70_000_000, device="cuda"), "float32"))
    for number, (x, dtype) in enumerate(items):
        digests.add(number, x, place_of(x, dtype))
    check(items, dict(digests.collect()))


@pytest.mark.gpu
def test_gpu_walk_beyond_two_to_the_31_elements() -> None:
    digests = DeviceDigests(torch.device("cuda", 0))
    x = torch.ones((1 << 31) + 12345, dtype=torch.bfloat16, device="cuda")
    x[-1] = 3
    digests.add(0, x, place_of(x, "bfloat16"))
    before = dict(digests.collect())[0]
    assert (before.count, before.sum, before.max) == (x.numel(), float(x.numel() + 2), 3.0)
    x[-2] = -1
    digests.add(1, x, place_of(x, "bfloat16"))
    after = dict(digests.collect())[1]
    assert after.hash != before.hash
    assert after.min == -1.0


@pytest.mark.gpu
def test_gpu_memory_is_read_before_it_is_reused() -> None:
    digests = DeviceDigests(torch.device("cuda", 0))
    wanted = []
    for number in range(200):
        x = torch.full((1_000_000,), float(number), device="cuda")
        digests.add(number, x, place_of(x, "float32"))
        wanted.append(float(number) * 1_000_000)
        del x
        torch.full((1_000_000,), -1.0, device="cuda")
    found = dict(digests.collect())
    assert [found[n].sum for n in range(200)] == wanted


@pytest.mark.gpu
def test_gpu_streams_have_their_own_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "CHUNKS", 8)
    monkeypatch.setattr(device_module, "MOST_CHUNKS", 8)
    digests = DeviceDigests(torch.device("cuda", 0))
    streams: list[Any] = [torch.cuda.Stream() for _ in range(3)]  # type: ignore[no-untyped-call]
    for number in range(60):
        with torch.cuda.stream(streams[number % 3]):
            x = torch.full((100_000,), float(number), device="cuda")
            digests.add(number, x, place_of(x, "float32"))
    found = dict(digests.collect())
    assert [found[n].sum for n in range(60)] == [n * 100_000.0 for n in range(60)]
