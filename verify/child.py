"""The process above's side of a child that judges: start it, hear it, tell how it ended, end it. No torch."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Protocol

import msgspec

from bridge import errors
from bridge.verify.request import Broke, Job, Refused
from bridge.verify.tasks import Message, Task

#: Importing torch and compiling a first kernel may take this long on a cold machine.
MIN_LOADING_SECONDS = 120.0

#: How the reason of a case that hung ends.
HANGS = "the kernel hangs"
#: Files in memory need no disk, which may be full or read-only.
_MEMORY = hasattr(os, "memfd_create")
#: Small blocks gain nothing from a pool of threads in every process.
_SETTINGS = {"OPENBLAS_NUM_THREADS": "1"}

_FRAME = re.compile(r'File "(.+?)", line (\d+) in (\S+)')
_DECODER: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


class Process(Protocol):
    """A process that can be waited for: `Popen`, or one that a nursery started."""

    pid: int

    def poll(self) -> int | None:
        """Exit status, -N for signal N; None while it runs."""

    def wait(self) -> int:
        """The exit status, once it has ended."""


class Pipes:
    """A child's ends of its pipes, this process's ends, and the file that a crash leaves its trace in.

    The file has no name, so that nothing is left of it however this process ends.
    """

    def __init__(self) -> None:
        self.trace = os.fdopen(os.memfd_create("trace"), "w+b") if _MEMORY else tempfile.TemporaryFile()
        self.said, self.say = os.pipe()  #: read here, written by the child
        self.taken, tasks = os.pipe()  #: read by the child, written here
        self.tasks = os.fdopen(tasks, "wb")

    def handed_over(self) -> None:
        """Close the child's ends: it has them now, or never will."""
        os.close(self.say)
        os.close(self.taken)

    def close(self) -> None:
        """Close what is left."""
        with contextlib.suppress(BrokenPipeError):
            self.tasks.close()
        os.close(self.said)
        self.trace.close()


def spawn(job: Job, *, nursery: int | None = None) -> Child:
    """Start a child in a fresh interpreter.

    Args:
        nursery: socket on which it is told to fork; None: it will not be.
    """
    pipes = Pipes()
    handed = (pipes.say, pipes.trace.fileno(), *(() if nursery is None else (nursery,)))
    # The current folder must not shadow a module (-P); the worker puts it last.
    command = [sys.executable, "-P", "-m", "bridge.verify.worker", *map(str, handed)]
    try:
        process = subprocess.Popen(
            command,
            stdin=pipes.taken,
            pass_fds=handed,
            # Its own group, so that whatever it started goes with it.
            start_new_session=True,
            env={**os.environ, **_SETTINGS},
        )
    except BaseException:
        pipes.handed_over()
        pipes.close()
        raise
    pipes.handed_over()
    child = Child(process, pipes)
    child.send(job)
    return child


class Child:
    """One child process and the pipes to it."""

    def __init__(self, process: Process, pipes: Pipes) -> None:
        self._process = process
        self._pipes = pipes
        self._buffer = bytearray()
        self._ended = False

    def fileno(self) -> int:
        """What to wait on for news."""
        return self._pipes.said

    def send(self, task: Job | Task) -> None:
        """Hand out a job or a task; a child that died meanwhile is found out by `read`."""
        with contextlib.suppress(BrokenPipeError):
            self._pipes.tasks.write(msgspec.json.encode(task) + b"\n")
            self._pipes.tasks.flush()

    def read(self) -> list[Message] | None:
        """What it said since; None: it has ended."""
        block = os.read(self._pipes.said, 1 << 20)
        if not block:
            return None
        self._buffer += block
        *lines, rest = bytes(self._buffer).split(b"\n")
        self._buffer = bytearray(rest)
        return [_DECODER.decode(line) for line in lines]

    def how_it_ended(self) -> str:
        """Why there is no more to read, in words."""
        status = self._process.wait()
        if status >= 0:
            return f"the process ended with exit status {status} (the kernel called exit?)"
        return f"the process died with {signal_name(-status)}{_where(self._pipes.trace)}"

    def kill(self) -> None:
        """Begin to end it and all that it started."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill it, if it still runs, and wait for that."""
        if self._ended:
            return
        self._ended = True
        self.kill()
        self._process.wait()
        self._pipes.close()


def hangs(seconds: float) -> str:
    """Why a child that said nothing for so long is given up, in words."""
    return f"nothing came back for {seconds:g} s: {HANGS} (--timeout)"


def raise_refusal(message: Refused | Broke) -> None:
    """Raise what the child could not serve, as if it had run in this process."""
    if isinstance(message, Refused):
        raise error_of(message)
    if os.environ.get("BRIDGE_DEBUG"):
        print(message.text, file=sys.stderr)
    raise RuntimeError(message.text.strip().rpartition("\n")[2])


def error_of(message: Refused) -> errors.BridgeError:
    """The error that the child raised."""
    made = getattr(errors, message.error)(message.message)
    assert isinstance(made, errors.BridgeError)
    return made


def signal_name(number: int) -> str:
    """ "SIGSEGV, segmentation fault" for 11."""
    try:
        found = signal.Signals(number)
    except ValueError:
        return f"signal {number}"
    meaning = (signal.strsignal(number) or "").lower()
    hint = ", perhaps out of memory" if found is signal.SIGKILL else ""
    return f"{found.name}, {meaning}{hint}" if meaning else found.name


def _where(trace: IO[bytes]) -> str:
    """ " in f (kernel.py:12)": the innermost frame outside installed packages, as faulthandler saw it."""
    # The child wrote through the same open file, so this end stands behind what it wrote.
    trace.seek(0)
    frames = _FRAME.findall(trace.read().decode(errors="replace"))
    own = [frame for frame in frames if "site-packages" not in frame[0] and "/lib/python" not in frame[0]]
    for file, line, function in (own or frames)[:1]:
        return f" in {function} ({Path(file).name}:{line})"
    return ""
