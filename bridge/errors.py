"""Everything a user can be told, as one tree; each leaf says when it is raised.

    BridgeError                     exit 2; `except BridgeError` catches all of it
    |-- UsageError                  arguments that cannot be served
    |-- ConfigError                 train.toml: wrong key, type or value
    |-- CaptureError                a capture folder cannot be read or written
    |   |-- NotACaptureError        the folder holds something else
    |   `-- CorruptCaptureError     truncated, tampered with, or torn
    |-- StepNotReachedError         the run ended before the step asked for
    |-- SpecError                   a KernelSpec does not fit the contract
    |-- KernelError                 the kernel under judgement raised
    |-- RunError                    the training run itself failed
    `-- NothingJudgedError          exit 3; nothing there to judge

A message says what is required, what was got, and what to do next, in one line.
This module imports nothing outside the standard library.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable
from typing import TypeGuard

EXIT_OK = 0
EXIT_FAIL = 1
EXIT_USAGE = 2
EXIT_INCONCLUSIVE = 3
EXIT_INTERNAL = 4
EXIT_INTERRUPTED = 130


class BridgeError(Exception):
    """Base of every error meant for a user's eyes."""

    exit_code = EXIT_USAGE


class UsageError(BridgeError):
    """The arguments cannot be served as given."""


class ConfigError(BridgeError):
    """A config file has a wrong key, type or value."""


class CaptureError(BridgeError):
    """A capture folder cannot be read or written."""


class NotACaptureError(CaptureError):
    """The folder exists but holds something other than a capture."""


class CorruptCaptureError(CaptureError):
    """A file of the capture is truncated, tampered with or missing."""


class StepNotReachedError(BridgeError):
    """The run ended before the step that was asked for."""


class SpecError(BridgeError):
    """A KernelSpec does not fit the contract of docs/kernel-spec.md."""


class KernelError(BridgeError):
    """The kernel under judgement raised instead of returning."""


class RunError(BridgeError):
    """The training run failed for a reason of its own."""


class NothingJudgedError(BridgeError):
    """There was nothing to judge, so there is no verdict."""

    exit_code = EXIT_INCONCLUSIVE


def near_misses(word: str, choices: Iterable[str], *, limit: int = 5) -> str:
    """Return a clause naming close matches, or all choices when few, for an error message."""
    names = sorted(set(choices))
    close = difflib.get_close_matches(word, names, n=limit, cutoff=0.5)
    if close:
        return f"did you mean {', '.join(close)}?"
    if not names:
        return "there are none"
    shown = ", ".join(names[: 2 * limit])
    return f"there are: {shown}" + (", ..." if len(names) > 2 * limit else "")


def brief(error: object, *, limit: int = 240) -> str:
    """The text of a foreign error on one line; a long one quotes the file, so its middle is left out."""
    text = " ".join(str(error).split())
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]} ... {text[-limit // 2 :]}"


def no_space(error: BaseException) -> TypeGuard[OSError]:
    """The disk is full, or its quota used up: no fault of ours."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
