"""The capture folder is made, replaced and refused by rule."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bridge.capture.folder import FolderClaim, disk_full
from bridge.capture.record import DISK_FULL
from bridge.capture.store import load_capture
from bridge.capture.tracer import Tracer
from bridge.errors import CaptureError, NotACaptureError


def make(out: Path, *, force: bool = False) -> None:
    tracer = Tracer(None, out=out, step=1, force=force)
    with tracer:
        torch.ones(2) + 1
    tracer.finish()


def test_a_new_an_empty_and_a_replaced_folder(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "capture"
    make(out)
    assert (out / ".gitignore").read_text() == "*\n"
    assert not (out / ".lock").exists()
    with pytest.raises(CaptureError, match="already holds a capture; give --force"):
        Tracer(None, out=out, step=2)
    make(out, force=True)
    assert load_capture(out).complete
    empty = tmp_path / "empty"
    empty.mkdir()
    make(empty)


def test_a_source_folder_is_never_touched(tmp_path: Path) -> None:
    out = tmp_path / "capture"
    out.mkdir()
    (out / "tracer.py").write_text("code")
    for force in (False, True):
        with pytest.raises(NotACaptureError, match=r"something other than a capture \(tracer\.py\)"):
            Tracer(None, out=out, step=1, force=force)
    assert [p.name for p in out.iterdir()] == ["tracer.py"]
    with pytest.raises(NotACaptureError, match="is a file"):
        Tracer(None, out=out / "tracer.py", step=1)


@pytest.mark.parametrize("stranger", ["notes.txt", "rank_00000/notes.txt", "rank_0/x"])
def test_a_capture_with_something_of_yours_in_it_is_not_replaced(stranger: str, tmp_path: Path) -> None:
    out = tmp_path / "c"
    make(out)
    (out / stranger).parent.mkdir(exist_ok=True)
    (out / stranger).write_text("mine")
    with pytest.raises(NotACaptureError):
        Tracer(None, out=out, step=1, force=True)
    assert (out / stranger).read_text() == "mine"


def test_links_are_not_followed_out_of_the_folder(tmp_path: Path) -> None:
    out, victim = tmp_path / "c", tmp_path / "victim"
    make(out)
    victim.mkdir()
    (victim / "calls.jsonl").write_text("mine")
    (out / "rank_00001").symlink_to(victim)
    with pytest.raises(NotACaptureError):
        Tracer(None, out=out, step=1, force=True)
    assert (victim / "calls.jsonl").read_text() == "mine"


def test_the_old_capture_stays_until_the_new_step_begins(tmp_path: Path) -> None:
    out = tmp_path / "c"
    make(out)
    tracer = Tracer(None, out=out, step=2, force=True)
    assert load_capture(out).complete
    tracer.finish()
    assert load_capture(out).manifest.step == 1


def test_a_folder_made_for_a_step_that_never_came_goes_away(tmp_path: Path) -> None:
    tracer = Tracer(None, out=tmp_path / "c", step=1)
    assert (tmp_path / "c").exists()
    tracer.finish()
    assert not (tmp_path / "c").exists()


def test_two_jobs_cannot_write_one_folder(tmp_path: Path) -> None:
    out = tmp_path / "c"
    first = FolderClaim(out, force=False)
    with pytest.raises(CaptureError, match="another process is writing"):
        FolderClaim(out, force=True)
    program = (
        "import sys, pathlib\nfrom bridge.capture.folder import FolderClaim\n"
        "FolderClaim(pathlib.Path(sys.argv[1]), force=True)"
    )
    command = [sys.executable, "-c", program, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "another process is writing" in done.stderr
    first.release()
    FolderClaim(out, force=False).release()


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises((CaptureError, NotACaptureError), match="another --out"):
        Tracer(None, out=tmp_path / "file" / "c", step=1)


def test_a_full_disk_is_found_among_problems() -> None:
    full = "rank.json could not be written: [Errno 28] No space left on device"
    assert disk_full(["a hook failed", full]) == full
    assert disk_full(["a hook failed"]) is None
    assert disk_full(["a hook failed", "voll"], {"voll": DISK_FULL}) == "voll"
    assert disk_full([full], {}) is None


def test_files_of_a_capture_without_its_manifest_are_not_replaced(tmp_path: Path) -> None:
    with Tracer(None, out=tmp_path / "c", step=1):
        torch.ones(2) + 1
    (tmp_path / "c" / "manifest.json").unlink()
    with pytest.raises(NotACaptureError, match=r"its manifest\.json is missing"):
        FolderClaim(tmp_path / "c", force=True)
