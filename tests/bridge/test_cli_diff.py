"""`bridge diff`, `bridge ab` and `bridge scan` on the command line: arguments, files, exit codes."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bridge.cli import run
from bridge.errors import CaptureError
from bridge.verify.diff import write_diff
from bridge.verify.diff_document import DiffDocument, ScanDocument, Side

SIDES = {"a": Side(label="A", path="a"), "b": Side(label="B", path="b")}


def answering(monkeypatch: pytest.MonkeyPatch, target: str, document: Any) -> list[dict[str, Any]]:
    """Replace a library function; returns the arguments it was called with."""
    seen: list[dict[str, Any]] = []

    def fake(*args: Any, **options: Any) -> Any:
        seen.append({"args": args, **options})
        return document

    monkeypatch.setattr(target, fake)
    return seen


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        ("IDENTICAL", 0),
        ("SAME WITHIN ROUNDING", 0),
        ("DIVERGED", 1),
        ("INCONCLUSIVE", 3),
        ("NOTHING MATCHED", 3),
    ],
)
def test_exit_codes_of_diff(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcome: Any, code: int) -> None:
    answering(
        monkeypatch, "bridge.verify.diff.diff_captures", DiffDocument(outcome=outcome, summary="so", **SIDES)
    )
    assert run(["diff", "a", "b", "--report", str(tmp_path / "r.html")]) == code
    document = msgspec.json.decode((tmp_path / "diff.json").read_bytes(), type=DiffDocument)
    assert document.outcome == outcome
    assert (tmp_path / "r.html").stat().st_size > 0


def test_arguments_of_diff_reach_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = answering(
        monkeypatch,
        "bridge.verify.diff.diff_captures",
        DiffDocument(outcome="IDENTICAL", summary="so", **SIDES),
    )
    options = [
        "--overrides",
        "o.csv",
        "--allow-mismatch",
        "--no-replay",
        "--report",
        str(tmp_path / "r.html"),
    ]
    assert run(["diff", "one", "two", *options]) == 0
    assert seen[0]["args"] == (Path("one"), Path("two"))
    assert seen[0]["overrides"] == Path("o.csv")
    assert seen[0]["allow_mismatch"] is True and seen[0]["replay"] is False


def test_json_is_alone_on_stdout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answering(
        monkeypatch,
        "bridge.verify.diff.diff_captures",
        DiffDocument(outcome="IDENTICAL", summary="so", **SIDES),
    )
    assert run(["diff", "a", "b", "--json", "--report", str(tmp_path / "r.html")]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["outcome"] == "IDENTICAL"
    assert "so" in captured.err


def test_markdown_is_the_whole_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answering(
        monkeypatch,
        "bridge.verify.diff.diff_captures",
        DiffDocument(outcome="DIVERGED", summary="here", **SIDES),
    )
    assert run(["diff", "a", "b", "--format", "markdown", "--report", str(tmp_path / "r.html")]) == 1
    out = capsys.readouterr().out
    assert "here" in out and "report   " not in out


def test_missing_folders_and_arguments_are_usage_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert run(["diff", "a"]) == 2
    assert run(["scan"]) == 2
    assert run(["ab", "--config", "train.toml"]) == 2


@pytest.mark.parametrize(
    ("verdict", "code"), [("PASS", 0), ("PASS WITH LIMITATIONS", 0), ("FAIL", 1), ("INCONCLUSIVE", 3)]
)
def test_exit_codes_of_scan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verdict: Any, code: int) -> None:
    seen = answering(
        monkeypatch,
        "bridge.verify.scan.scan_capture",
        ScanDocument(verdict=verdict, summary="so", capture=SIDES["a"]),
    )
    options = ["--from", "cap", "--ops", "*mm*", "--jobs", "3", "--report", str(tmp_path / "r.html")]
    assert run(["scan", *options]) == code
    assert seen[0]["args"] == (Path("cap"),) and seen[0]["ops"] == ("*mm*",) and seen[0]["jobs"] == 3
    assert msgspec.json.decode((tmp_path / "scan.json").read_bytes(), type=ScanDocument).verdict == verdict


def test_arguments_of_ab_reach_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    document = DiffDocument(kind="ab", outcome="SAME WITHIN ROUNDING", summary="so", **SIDES)
    seen = answering(monkeypatch, "bridge.verify.ab.ab_run", document)
    options = [
        "--override",
        "a.b",
        "--override",
        "x=1",
        "--find-step",
        "--last-step",
        "9",
        "--kernel",
        "k.py",
    ]
    assert run(["ab", "--config", "c.toml", *options, "--report", str(tmp_path / "r.html")]) == 0
    assert seen[0]["args"] == (Path("c.toml"),)
    assert seen[0]["overrides"] == ("a.b", "x=1")
    assert seen[0]["find_step"] is True and seen[0]["last_step"] == 9 and seen[0]["kernels"] == ("k.py",)


def test_an_unwritable_report_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answering(
        monkeypatch,
        "bridge.verify.diff.diff_captures",
        DiffDocument(outcome="IDENTICAL", summary="so", **SIDES),
    )
    (tmp_path / "file").write_text("")
    assert run(["diff", "a", "b", "--report", str(tmp_path / "file" / "r.html")]) == 2
    assert "choose another --report" in capsys.readouterr().err


def test_a_full_disk_leaves_no_part_of_a_document(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = DiffDocument(outcome="IDENTICAL", summary="so", **SIDES)
    answering(monkeypatch, "bridge.verify.diff.diff_captures", document)

    def full(path: Path, data: bytes) -> int:
        path.open("wb").close()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert run(["diff", "a", "b", "--report", str(tmp_path / "r.html")]) == 2
    assert "No space left on device" in capsys.readouterr().err
    with pytest.raises(CaptureError, match="No space left on device"):
        write_diff(document, tmp_path / "diff.json")
    assert not list(tmp_path.iterdir())
