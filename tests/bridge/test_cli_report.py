"""`bridge report`: a document rendered again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bridge import errors
from bridge.cli import run
from bridge.report import write_json
from bridge.verify.verdict import TensorVerdict, Verdict


@pytest.fixture
def document(tmp_path: Path) -> Path:
    entry = TensorVerdict(
        tensor="grad_x",
        case="(3, 257) bfloat16",
        verdict="FAIL",
        dtype="bfloat16",
        shape=(3, 257),
        reason="27 times its threshold",
        reference_error=0.001,
        target_error=0.108,
        threshold=0.004,
        reference_relative_error=0.0002,
        gate_valid=True,
    )
    path = tmp_path / "verdict.json"
    write_json(Verdict(verdict="FAIL", op="offset_rmsnorm", tensors=(entry,)), path)
    return path


def test_text_on_stdout(document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code says that the report was written, whatever its verdict."""
    assert run(["report", str(document)]) == errors.EXIT_OK
    out = capsys.readouterr().out
    assert out.startswith(
        "FAIL  offset_rmsnorm is wrong: grad_x on (3, 257) bfloat16, 27 times its threshold."
    )
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("report.html", "<!doctype html>"),
        ("report.md", "### \u2717 FAIL"),
        ("junit.xml", "<?xml"),
        ("report.txt", "FAIL"),
        ("copy.json", "{"),
        ("report.unknown", "<!doctype html>"),
    ],
)
def test_form_follows_the_file_name(
    document: Path, tmp_path: Path, name: str, start: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out" / name
    assert run(["report", str(document), "-o", str(target)]) == errors.EXIT_OK
    assert target.read_text("utf-8").startswith(start)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"wrote {target}\n"


def test_form_can_be_named(document: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(document), "--format", "json", "-o", "-"]) == errors.EXIT_OK
    assert json.loads(capsys.readouterr().out)["op"] == "offset_rmsnorm"
    target = tmp_path / "report.html"
    assert run(["report", str(document), "--format", "markdown", "-o", str(target)]) == errors.EXIT_OK
    assert target.read_text("utf-8").startswith("### ")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["missing.json"], "cannot read missing.json: No such file or directory"),
        ([os.devnull], "is not a verdict.json"),
        (["{document}", "--format", "pdf"], "'pdf' is not one of"),
        (["{document}", "-o", "/proc/none/report.html"], "cannot write /proc/none/report.html"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    document: Path, arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(["report", *(argument.replace("{document}", str(document)) for argument in arguments)])
    assert code == errors.EXIT_USAGE
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1


def test_help_loads_no_torch() -> None:
    script = (
        "import sys; from bridge.cli import run; run(['report', '--help']); "
        "sys.exit(bool({'torch', 'plotly', 'jinja2', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "Render DOCUMENT" in result.stdout
