"""Offset RMSNorm beyond what every built-in is tested for: sizes, dtypes, the visible fallback."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from bridge.errors import KernelError, UsageError
from bridge.kernels import _reduce
from bridge.kernels._dispatch import KernelFallbackWarning, warn_fallback
from bridge.kernels.offset_rmsnorm import kernel
from bridge.kernels.offset_rmsnorm.op import offset_rms_norm, uses_kernel
from bridge.kernels.offset_rmsnorm.reference import reference
from bridge.kernels.offset_rmsnorm.spec import SPEC

EPS = 1e-6


def _pair(
    gate: SimpleNamespace, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device=gate.device).manual_seed(11)
    x = torch.randn(shape, generator=generator, device=gate.device).to(dtype)
    weight = (0.1 * torch.randn(shape[-1], generator=generator, device=gate.device)).to(dtype)
    return x, weight


def test_no_rows(gate: SimpleNamespace) -> None:
    x, weight = _pair(gate, (0, 33), torch.float16)
    x.requires_grad_()
    weight.requires_grad_()
    y = offset_rms_norm(x, weight, eps=EPS, backend="kernel")
    grads = torch.autograd.grad(y.sum(), (x, weight))
    assert y.shape == (0, 33) and grads[0].shape == (0, 33)
    assert torch.equal(grads[1], torch.zeros_like(weight))


def test_widest_row(gate: SimpleNamespace) -> None:
    gate.judge(SPEC, _pair(gate, (2, kernel.MAX_COLUMNS), torch.float32))


def test_a_row_too_wide_is_refused(gate: SimpleNamespace) -> None:
    x, weight = _pair(gate, (1, kernel.MAX_COLUMNS + 1), torch.float16)
    assert not uses_kernel(x, weight)
    with pytest.raises(KernelError, match="65536 columns, got 65537"):
        offset_rms_norm(x, weight, eps=EPS, backend="kernel")


def test_programs_that_walk_several_tiles(gate: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each backward program takes four tiles of 64 rows, as with many rows; the last ones are empty."""
    monkeypatch.setattr(_reduce, "_tiles", lambda *_: 4)
    gate.judge(SPEC, _pair(gate, (640, 16), torch.float16))


@pytest.mark.parametrize("shape", [(5,), (2, 3, 4, 33)])
def test_any_rank(gate: SimpleNamespace, shape: tuple[int, ...]) -> None:
    gate.judge(SPEC, _pair(gate, shape, torch.float16))


def test_weight_of_another_dtype(gate: SimpleNamespace) -> None:
    x, weight = _pair(gate, (7, 65), torch.float16)
    gate.judge(SPEC, (x, weight.float()))


def test_a_nan_stays_in_its_row(gate: SimpleNamespace) -> None:
    x, weight = _pair(gate, (4, 65), torch.float16)
    x[1, 7] = torch.nan
    y = offset_rms_norm(x, weight, eps=EPS, backend="kernel")
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2, 3]], reference(x, weight, eps=EPS)[[0, 2, 3]])


def test_weight_that_does_not_fit(gate: SimpleNamespace) -> None:
    x, _ = _pair(gate, (4, 65), torch.float16)
    with pytest.raises(UsageError, match=r"got x \(4, 65\) and weight \(64,\)"):
        offset_rms_norm(x, torch.ones(64, device=gate.device), eps=EPS)


@pytest.fixture
def forgetful() -> Iterator[None]:
    """The once-only warning may be given again."""
    warn_fallback.cache_clear()
    yield
    warn_fallback.cache_clear()


@pytest.mark.usefixtures("forgetful")
def test_fallback_is_said_once_and_only_when_allowed(
    gate: SimpleNamespace, recwarn: pytest.WarningsRecorder
) -> None:
    x, weight = (tensor.double() for tensor in _pair(gate, (4, 65), torch.float32))
    assert not uses_kernel(x)
    for _ in range(2):
        assert torch.equal(offset_rms_norm(x, weight, eps=EPS), reference(x, weight, eps=EPS))
    said = [str(w.message) for w in recwarn if issubclass(w.category, KernelFallbackWarning)]
    assert len(said) == 1 and "float64" in said[0]
    with pytest.raises(KernelError, match="float64"):
        offset_rms_norm(x, weight, eps=EPS, backend="kernel")


@pytest.mark.usefixtures("forgetful")
def test_fallback_is_said_under_compile(gate: SimpleNamespace) -> None:
    x, weight = (tensor.double() for tensor in _pair(gate, (4, 65), torch.float32))
    compiled = torch.compile(lambda x, w: offset_rms_norm(x, w, eps=EPS), fullgraph=True, backend="aot_eager")
    with pytest.warns(KernelFallbackWarning, match="float64"):
        compiled(x, weight)


def test_a_choice_of_eager_is_silent(gate: SimpleNamespace, recwarn: pytest.WarningsRecorder) -> None:
    x, weight = _pair(gate, (4, 65), torch.float16)
    assert torch.equal(offset_rms_norm(x, weight, eps=EPS, backend="eager"), reference(x, weight, eps=EPS))
    assert not [w for w in recwarn if issubclass(w.category, KernelFallbackWarning)]


def test_unknown_backend(gate: SimpleNamespace) -> None:
    x, weight = _pair(gate, (4, 65), torch.float16)
    with pytest.raises(UsageError, match="auto, kernel, eager, got 'cuda'"):
        offset_rms_norm(x, weight, eps=EPS, backend="cuda")  # type: ignore[arg-type]


def test_without_triton_it_says_so() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from bridge.kernels.offset_rmsnorm.op import offset_rms_norm\n"
        "offset_rms_norm(torch.ones(2, 4), torch.zeros(4), eps=1e-6)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "triton is not available" in done.stderr
