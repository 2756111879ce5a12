"""What a step will take is said when its forward pass is over, and what cannot be kept is not copied."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from bridge.capture import writer as writer_module
from bridge.capture.select import Selection
from bridge.capture.store import Capture, load_capture
from bridge.capture.tracer import Tracer
from bridge.cli import run
from tests.capture.conftest import Net, Trainer


def captured(out: Path, *patterns: str, **more: Any) -> Capture:
    trainer = Trainer(Net(width=32, layers=3))
    trainer.step()
    tracer = Tracer(trainer.model, out=out, step=2, selection=Selection(patterns=patterns), **more)
    with tracer:
        trainer.step()
    return load_capture(tracer.finish())


@pytest.mark.parametrize("patterns", [("*",), ("Norm",)])
def test_the_forecast_is_near(
    patterns: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = captured(tmp_path / "c", *patterns).manifest
    assert manifest.forecast_bytes is not None
    assert 0.6 < manifest.forecast_bytes / manifest.stored_bytes < 1.6
    assert "expected to take" not in caplog.text


def test_what_the_budget_cannot_take_is_said_before_it_is_used_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    told: list[int] = []
    real = writer_module.RankWriter.foresee

    def foresee(self: writer_module.RankWriter, nbytes: int) -> None:
        told.append(len(self.dropped))
        real(self, nbytes)

    monkeypatch.setattr(writer_module.RankWriter, "foresee", foresee)
    with caplog.at_level(logging.WARNING, logger="bridge.capture"):
        manifest = captured(tmp_path / "c", "*", budget_bytes=150_000).manifest
    assert "are expected to take about" in caplog.text
    assert "the budget is 146.5 KiB" in caplog.text
    assert told == [0, 0]
    assert manifest.stored_bytes <= 150_000
    assert manifest.dropped
    assert run(["inspect", str(tmp_path / "c")]) == 0
    assert "forecast" in capsys.readouterr().out


def test_what_the_disk_cannot_take_is_not_copied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module.RankWriter, "_disk_room", lambda self: 100_000 - self._accepted)
    monkeypatch.setattr(writer_module, "_LOOK_BYTES", 0)
    with caplog.at_level(logging.WARNING, logger="bridge.capture"):
        manifest = captured(tmp_path / "c", "*").manifest
    assert "the disk has room for 97.7 KiB" in caplog.text
    assert 50_000 < manifest.stored_bytes <= 100_000
    assert all("bytes free" in drop.reason for drop in manifest.dropped)
