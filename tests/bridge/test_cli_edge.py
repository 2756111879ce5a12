"""The edge of the command line: exit codes, one-line errors, laziness."""

from __future__ import annotations

import errno
import importlib
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from bridge import cli, errors

ERRORS = [
    (errors.UsageError("no"), 2),
    (errors.ConfigError("no"), 2),
    (errors.NotACaptureError("no"), 2),
    (errors.CorruptCaptureError("no"), 2),
    (errors.StepNotReachedError("no"), 2),
    (errors.SpecError("no"), 2),
    (errors.KernelError("no"), 2),
    (errors.NothingJudgedError("no"), 3),
    (click.UsageError("no"), 2),
    (click.BadParameter("no"), 2),
    (click.FileError("no"), 2),
    (KeyboardInterrupt(), 130),
    (click.Abort(), 130),
    (ValueError("two\nlines"), 4),
]


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A verb whose outcome the test sets."""
    outcome: dict[str, Any] = {"result": None}

    @click.command("outcome")
    def command() -> Any:
        if isinstance(outcome["result"], BaseException):
            raise outcome["result"]
        return outcome["result"]

    monkeypatch.setitem(cli.VERBS, "outcome", "for tests")
    monkeypatch.setattr(
        cli.VerbGroup, "get_command", lambda self, ctx, name: command if name == "outcome" else None
    )
    monkeypatch.delenv("BRIDGE_DEBUG", raising=False)
    return outcome


@pytest.mark.parametrize(("error", "code"), ERRORS, ids=[type(error).__name__ for error, _ in ERRORS])
def test_every_error_has_its_exit_code_and_one_line(
    verb: Any, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    verb["result"] = error
    assert cli.run(["outcome"]) == code
    out, err = capsys.readouterr()
    # click breaks the line of a terminal's ^C before the message.
    assert out == "" and err.strip().count("\n") == 0 and err.lstrip().startswith("bridge: ")


@pytest.mark.parametrize("code", [0, 1, 3])
def test_a_verbs_number_is_the_exit_code(verb: Any, code: int) -> None:
    verb["result"] = code
    assert cli.run(["outcome"]) == code


def test_a_verb_that_returns_nothing_succeeded(verb: Any) -> None:
    assert cli.run(["outcome"]) == 0


def test_a_traceback_only_on_request(
    verb: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    verb["result"] = errors.UsageError("no")
    monkeypatch.setenv("BRIDGE_DEBUG", "1")
    assert cli.run(["outcome"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_an_unknown_verb_lists_near_misses(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["verfy"]) == 2
    assert "did you mean verify" in capsys.readouterr().err


def test_without_a_verb_the_help_is_shown_as_it_is_laid_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([]) == 2
    assert "\nCommands:\n  capture" in capsys.readouterr().err


def test_an_unknown_option_points_at_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["env", "--jsn"]) == 2
    err = capsys.readouterr().err
    assert "--jsn" in err and "bridge env --help" in err and err.count("\n") == 1


@pytest.mark.parametrize("verb", sorted(cli.VERBS))
def test_every_verb_exists_and_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(f"bridge.cli.{verb}")
    assert isinstance(module.command, click.Command)
    assert cli.run([verb, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"Usage: bridge {verb}")


def test_help_of_everything_loads_neither_torch_nor_plotly() -> None:
    code = (
        "import sys\nfrom bridge import cli\n"
        "assert cli.run(['--help']) == 0\n"
        "for verb in cli.VERBS:\n    assert cli.run([verb, '--help']) == 0\n"
        "print('loaded', [m for m in ('torch', 'triton', 'plotly', 'torchtitan') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("loaded []")
    assert "Exit codes" in done.stdout


def test_a_closed_pipe_is_no_error() -> None:
    code = "import sys; from bridge import cli; sys.exit(cli.run(['--help']))"
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_module_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bridge", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("numerics-bridge ")


def test_a_full_disk_is_no_internal_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "report.html")

    monkeypatch.setattr(cli.cli, "main", full)
    assert cli.run(["env"]) == errors.EXIT_USAGE
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "report.html cannot be written" in said


def test_brief_keeps_one_line_and_both_ends() -> None:
    text = errors.brief("first\n" + "x" * 10_000 + " last")
    assert text.startswith("first x")
    assert text.endswith("x last")
    assert len(text) < 260
    assert errors.brief("short\n text") == "short text"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_no_trouble(closed: str, tmp_path: Path) -> None:
    """A file that is opened must not become the stdout of a command that was started without one."""
    command = f"{shlex.quote(sys.executable)} -P -m bridge inspect {shlex.quote(str(tmp_path))} {closed}"
    assert subprocess.run(["sh", "-c", command], capture_output=True, check=False).returncode == 2
    command = f"{shlex.quote(sys.executable)} -P -m bridge --version {closed}"
    assert subprocess.run(["sh", "-c", command], capture_output=True, check=False).returncode == 0
