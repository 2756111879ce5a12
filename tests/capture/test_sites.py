"""Which tensors are kept without `--ops`, and with it."""

from __future__ import annotations

from bridge.capture.sites import expand, known_sites


def test_optimizer_steps_of_torch_are_kept_when_asked_for() -> None:
    said: list[str] = []
    every = expand((), known_sites((), said.append))
    assert not said
    assert "bridge::adamw_step" in every and "aten::softmax.int" in every
    assert not any(pattern.startswith("aten::_fused") for pattern in every)
    assert "aten::_fused_adamw_" in expand(("adamw",), known_sites(("adamw",), said.append))
