"""The source line of a call is the user's or torchtitan's, never the plumbing's."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch

from bridge.capture.source import _is_outside, source_line

SITE = Path(torch.__file__).parent.parent


def test_names_this_file() -> None:
    line = source_line()
    assert line is not None
    assert "test_source.py" in line
    assert line.endswith("in test_names_this_file")


def test_torchtitan_is_not_torch() -> None:
    assert _is_outside(str(SITE / "torchtitan" / "trainer.py"))
    assert not _is_outside(str(SITE / "torch" / "nn" / "modules" / "module.py"))


def test_plumbing_is_passed_over() -> None:
    assert not _is_outside(contextlib.__file__)
    assert not _is_outside("<string>")
    assert _is_outside(str(Path(os.sep, "srv", "train.py")))
