"""Digests: against numpy and plain arithmetic, and what the hash must see."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.capture import digest_host, digest_native
from bridge.capture.digest import MASK, STEP, Sums, finish, mix
from bridge.capture.record import Digest

DTYPES = [
    "float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64", "uint16",
    "uint32", "bool", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128",
]  # fmt: skip


def digest(tensor: torch.Tensor) -> Digest:
    tensor = tensor.contiguous()
    return digest_host.digest_bytes(
        tensor.data_ptr(), tensor.numel(), str(tensor.dtype).removeprefix("torch.")
    )


def drawn(count: int, dtype: str, seed: int = 0) -> torch.Tensor:
    x = 5 * torch.randn(count, generator=torch.Generator().manual_seed(seed))
    return x.to(getattr(torch, dtype))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)


@pytest.fixture(params=["C", "numpy"])
def walker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numpy":
        monkeypatch.setattr(digest_native, "load", lambda: None)
    elif digest_native.load() is None:
        pytest.skip("needs a C compiler")
    return str(request.param)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 7, 8193, 140_001])
def test_statistics(dtype: str, count: int, walker: str) -> None:
    x = drawn(count, dtype)
    found = digest(x)
    values = (torch.view_as_real(x) if x.is_complex() else x).double().flatten()
    assert found.count == values.numel()
    scale = max(float(values.abs().sum()), 1e-30)
    assert abs(found.sum - float(values.sum())) <= 1e-6 * scale
    assert math.isclose(found.abs_sum, float(values.abs().sum()), rel_tol=1e-6)
    assert math.isclose(found.sq_sum, float((values * values).sum()), rel_tol=1e-5)
    assert found.min == (float(values.min()) if count else None)
    assert found.max == (float(values.max()) if count else None)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "float8_e5m2"])
def test_what_is_not_finite_is_counted_and_left_out(dtype: str, walker: str) -> None:
    x = drawn(5000, "float32")
    x[7], x[4000], x[11], x[12], x[4999] = math.nan, math.nan, math.inf, -math.inf, -math.inf
    x = x.to(getattr(torch, dtype))
    found = digest(x)
    finite = x.double()[x.double().isfinite()]
    assert (found.nan, found.pos_inf, found.neg_inf, found.count) == (2, 1, 2, 5000)
    assert found.min == float(finite.min())
    assert abs(found.sum - float(finite.sum())) <= 1e-6 * float(finite.abs().sum())


@pytest.mark.parametrize("scale", [1e-25, 1e30])
def test_squares_neither_vanish_nor_overflow(scale: float, walker: str) -> None:
    x = drawn(3000, "float32") * scale
    assert math.isclose(digest(x).sq_sum, float((x.double() ** 2).sum()), rel_tol=1e-6)


def test_all_nan_and_overflowing_sums_stay_json(walker: str) -> None:
    assert digest(torch.full((9,), math.nan)).min is None
    huge = digest(torch.full((4,), 1.5e308, dtype=torch.float64))
    assert math.isfinite(huge.abs_sum)


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_walkers_hash_alike(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if digest_native.load() is None:
        pytest.skip("needs a C compiler")
    for count in (1, 3, 65_535, 70_001):
        x = drawn(count, dtype, count)
        compiled = digest(x).hash
        with monkeypatch.context() as patch:
            patch.setattr(digest_native, "load", lambda: None)
            assert digest(x).hash == compiled


def test_hash_is_what_its_definition_says() -> None:
    data = bytes(range(256)) * 300 + b"tail!"
    padded = data + bytes(-len(data) % 8)
    total = 0
    for k, start in enumerate(range(0, len(padded), 8)):
        x = int.from_bytes(padded[start : start + 8], "little")
        block, j = divmod(k, 8192)
        z = (j + 1) * STEP & MASK
        total += (mix(block) | 1) * ((x ^ (x >> 29)) * ((z ^ (z >> 31)) | 1))
    array = np.frombuffer(data, dtype=np.uint8)
    found = digest_host.digest_bytes(array.ctypes.data, len(data), "uint8")
    assert found.hash == f"{mix(((total & MASK) + mix(len(data))) & MASK):016x}"


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["float32", "bfloat16", "float16", "float64"]),
    st.integers(2, 40),
    st.integers(2, 60),
    st.integers(0, 2**31),
)
def test_hash_sees_what_a_norm_does_not(dtype: str, rows: int, columns: int, seed: int) -> None:
    x = drawn(rows * columns, dtype, seed).view(rows, columns)
    x[x == 0] = 1
    others = {
        "negated": -x,
        "one sign": torch.cat((-x[:1, :1].flatten(), x.flatten()[1:])),
        "rows swapped": x.flip(0),
        "columns swapped": x.flip(1),
        "rolled": x.roll(1, 0),
        "all signs of a row": torch.cat((-x[:1], x[1:])),
        "pairs swapped": x.flatten()[: rows * columns // 2 * 2].view(-1, 2).flip(1),
        "shape kept, last bit": (x.view(torch.uint8) ^ 1).view(x.dtype),
    }
    mine = digest(x).hash
    for name, other in others.items():
        if other.numel() != x.numel() or not torch.equal(raw(other), raw(x)):
            assert digest(other).hash != mine, name


def test_zeros_of_different_length_and_minus_zero_differ() -> None:
    hashes = {digest(torch.zeros(count)).hash for count in range(50)}
    assert len(hashes) == 50
    assert digest(torch.zeros(4)).hash != digest(-torch.zeros(4)).hash


def test_sums_of_nothing() -> None:
    found = digest(torch.empty(0, 3))
    assert (found.count, found.min, found.sum) == (0, None, 0.0)
    assert found == finish(Sums(), count=0, nbytes=0)


def test_types_without_a_digest_are_refused() -> None:
    with pytest.raises(ValueError, match="int4"):
        digest_host.digest_bytes(0, 1, "int4")


def test_without_a_compiler_numpy_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDGE_DIGEST", "numpy")
    assert digest_native.load.__wrapped__() is None
    monkeypatch.delenv("BRIDGE_DIGEST")
    monkeypatch.setattr(digest_native, "_object_file", lambda: (_ for _ in ()).throw(OSError("no compiler")))
    assert digest_native.load.__wrapped__() is None
