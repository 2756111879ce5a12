"""A shard that is truncated, changed or gone: every reader says so, and reads the rest."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch

from bridge.capture.select import Selection
from bridge.capture.store import load_capture
from bridge.capture.tracer import Tracer
from bridge.cli import run
from bridge.errors import CorruptCaptureError

SHARD = "rank_00000/tensors-00000.safetensors"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    out = tmp_path_factory.mktemp("damage") / "capture"
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
    tracer = Tracer(model, out=out, step=1, selection=Selection(patterns=("*",)))
    with tracer:
        model(torch.randn(4, 8)).sum().backward()
    return tracer.finish()


@pytest.fixture
def whole(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # reports are written here
    return Path(shutil.copytree(template, tmp_path / "c"))


def as_older(path: Path) -> None:
    """List shards as captures of earlier tools did: among the files, by the sha256 of the whole."""
    manifest = json.loads((path / "manifest.json").read_text())
    for rank in manifest["ranks"]:
        for name in rank.pop("shards"):
            rank["files"][name] = hashlib.sha256((path / name).read_bytes()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))


def damage(path: Path, kind: str) -> None:
    shard = path / SHARD
    data = shard.read_bytes()
    if kind == "missing":
        shard.unlink()
    else:
        shard.write_bytes(data[:-10] if kind == "truncated" else data[:-3] + b"\x7f" + data[-2:])


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("kind", ["missing", "truncated"])
def test_inspect_shows_it_as_an_incomplete_part(
    kind: str, older: bool, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if older:
        as_older(whole)
    assert load_capture(whole).complete
    damage(whole, kind)
    assert run(["inspect", str(whole)]) == 2
    text = capsys.readouterr().out
    state, problem, *_ = text.splitlines()
    assert "INCOMPLETE" in state
    assert f"{whole / SHARD} is {kind}" in problem
    capture = load_capture(whole)
    assert not capture.complete
    assert len(capture.calls) > 5


@pytest.mark.parametrize("older", [False, True])
def test_a_changed_byte_is_found_when_every_byte_is_compared(
    older: bool, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if older:
        as_older(whole)
    assert run(["inspect", str(whole), "--check"]) == 0
    assert "every byte as it was written" in capsys.readouterr().out
    damage(whole, "flipped")
    assert run(["inspect", str(whole)]) == 0
    capsys.readouterr()
    assert run(["inspect", str(whole), "--check", "--json"]) == 2
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert str(whole / SHARD) in problem
    assert "changed" in problem
    with pytest.raises(CorruptCaptureError, match="changed"):
        load_capture(whole).verify_files()


def test_a_changed_header_is_found_without_reading_a_blob(whole: Path) -> None:
    data = bytearray((whole / SHARD).read_bytes())
    data[60_000] ^= 1
    (whole / SHARD).write_bytes(data)
    (problem,) = load_capture(whole).problems
    assert "header" in problem


def test_diff_of_a_damaged_capture_says_so(
    template: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["diff", str(template), str(whole)]) == 0
    assert str(whole / SHARD) not in capsys.readouterr().out
    damage(whole, "truncated")
    assert run(["diff", str(template), str(whole)]) == 0
    text = capsys.readouterr().out
    assert "by their digests" in text
    assert f"{whole / SHARD} is truncated".replace(" ", "") in "".join(text.split())  # lines are wrapped


def test_scan_of_a_damaged_capture_names_the_file(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(whole, "truncated")
    assert run(["scan", "--from", str(whole)]) == 2
    assert f"{whole / SHARD} is truncated" in capsys.readouterr().err
