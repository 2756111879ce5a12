"""Windows and triggers."""

from __future__ import annotations

import pytest

from bridge.capture.window import LossJumpTrigger, NonfiniteTrigger, Window, parse_window
from bridge.errors import UsageError


@pytest.mark.parametrize(
    ("text", "first", "last", "at"),
    [
        ("100", 100, 100, 100),
        (7, 7, 7, 7),
        ("90:110", 90, 110, 110),
        ("90:110@100", 90, 110, 100),
        ("5@5", 5, 5, 5),
    ],
)
def test_windows(text: str | int, first: int, last: int, at: int) -> None:
    assert parse_window(text) == Window(first=first, last=last, tensors_at=at)


@pytest.mark.parametrize("text", ["", "0", "-1", "a", "1:2:3", "5:", "9:8", "1:5@6", ":5", "1.5"])
def test_windows_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--step"):
        parse_window(text)


def test_an_open_window_needs_a_trigger() -> None:
    window = parse_window("5:", triggered=True)
    assert 4 not in window
    assert 5 in window
    assert 10**9 in window


def test_nonfinite_fires_on_loss_and_gradient() -> None:
    trigger = NonfiniteTrigger()
    assert trigger.fires(1.0, 2.0) is None
    assert trigger.fires(None, None) is None
    assert "loss" in str(trigger.fires(float("nan"), 1.0))
    assert "gradient norm" in str(trigger.fires(1.0, float("inf")))


def test_loss_jump_needs_history_and_a_jump() -> None:
    trigger = LossJumpTrigger(warmup=4)
    for loss in (5.0, 4.9, 4.8, 4.7, 4.6, 4.5):
        assert trigger.fires(loss, None) is None
    assert "above" in str(trigger.fires(9.0, None))
    # The jump itself does not become the new normal.
    assert trigger.fires(9.0, None) is not None


def test_loss_jump_ignores_noise_and_an_early_spike() -> None:
    trigger = LossJumpTrigger(warmup=4)
    assert trigger.fires(1.0, None) is None
    assert trigger.fires(100.0, None) is None
    for loss in (1.0, 1.1, 0.9, 1.05, 1.0, 1.08):
        assert trigger.fires(loss, None) is None
