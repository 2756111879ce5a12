"""The kernels of torchtitan 0.3's own overrides, unmodified, judged on drawn inputs."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from bridge.verify import verify_kernel

pytest.importorskip("torchtitan.config.override", reason="torchtitan here has no overrides (needs 0.3)")

FILE = Path(__file__).with_name("titan_overrides.py")


@pytest.mark.parametrize("name", ["SWIGLU", "MLA_KV"])
def test_right(name: str) -> None:
    verdict = verify_kernel(f"{FILE}:{name}", dtypes=("float16",), quick=True)
    assert verdict.verdict == "PASS", verdict.summary
    assert verdict.fidelity.launched


@pytest.mark.parametrize("name", ["COS_SIN", "COMPLEX"])
def test_helion(name: str) -> None:
    """One case each: Helion compiles for every shape and layout, which takes seconds."""
    pytest.importorskip("helion", reason="helion_rope needs helion")
    verdict = verify_kernel(
        f"{FILE.with_name('titan_helion.py')}:{name}",
        dtypes=("bfloat16",),
        shapes=((1, 5, 3, 16),),
        quick=True,
    )
    assert verdict.verdict == "PASS", verdict.summary
    assert any(kernel.startswith("_helion_") for kernel in verdict.fidelity.kernels)


@pytest.mark.skipif(metadata.version("torchtitan") != "0.3.0", reason="what is shown is torchtitan 0.3.0")
def test_the_mla_query_rotates_the_incoming_gradient_in_place() -> None:
    """Values are right; the backward writes to its grad_output, which other consumers may still read."""
    verdict = verify_kernel(f"{FILE}:MLA_Q", dtypes=("float16",), quick=True)
    assert verdict.verdict == "FAIL"
    reasons = {(t.tensor, t.reason) for t in verdict.tensors if t.verdict == "FAIL"}
    assert {tensor for tensor, _ in reasons} == {"grad_q_nope", "grad_q_pe"}
    assert all("was written to" in reason for _, reason in reasons)
