"""A report file is complete or absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bridge.errors import UsageError
from bridge.report.files import write_file


def test_text_and_bytes(tmp_path: Path) -> None:
    write_file(tmp_path / "a.txt", "\u00e9\n")
    write_file(tmp_path / "b.bin", b"\x00")
    assert (tmp_path / "a.txt").read_bytes() == b"\xc3\xa9\n"
    assert (tmp_path / "b.bin").read_bytes() == b"\x00"


def test_missing_folders_are_made(tmp_path: Path) -> None:
    write_file(tmp_path / "x" / "y" / "report.html", "new")
    assert (tmp_path / "x" / "y" / "report.html").read_text() == "new"


def test_failure_leaves_the_old_file_and_no_partial_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")

    def full(self: Path, content: bytes) -> int:
        with self.open("wb") as stream:
            stream.write(content[:1])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UsageError, match="No space left on device"):
        write_file(path, "new")
    assert [item.name for item in tmp_path.iterdir()] == ["report.html"]
    assert path.read_text() == "old"


def test_interrupt_leaves_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_file(tmp_path / "report.html", "new")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_refused_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"needs a file name, got the folder .*report\.html"):
        write_file(tmp_path, "new")


def test_a_parent_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        write_file(tmp_path / "file" / "report.html", "new")


def test_a_symbolic_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real.html").write_text("old")
    (tmp_path / "link.html").symlink_to(tmp_path / "real.html")
    write_file(tmp_path / "link.html", "new")
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "real.html").read_text() == "new"


def test_a_device_is_written_to_directly() -> None:
    write_file(os.devnull, "new")
    assert Path(os.devnull).is_char_device()
