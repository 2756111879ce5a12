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

import msgspec

from bridge import errors
from bridge.verify.request import Broke, Job, Refused
from bridge.verify.tasks import Message, Task

#: Importing torch and compiling a first kernel may take this long on a cold machine.
MIN_LOADING_SECONDS = 120.0

_FRAME = re.compile(r'File "(.+?)", line (\d+) in (\w+)')
_DECODER: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


class Child:
    """One child process and the pipe that it speaks through."""

    def __init__(self, job: Job) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="bridge-")
        self._trace = Path(self._folder.name) / "fault"
        self._buffer = bytearray()
        self._reading, writing = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bridge.verify.worker", str(writing), str(self._trace)],
                stdin=subprocess.PIPE,
                pass_fds=(writing,),
                # Its own group, so that whatever it started goes with it.
                start_new_session=True,
                # Small blocks gain nothing from a pool of threads in every process.
                env={"OPENBLAS_NUM_THREADS": "1", **os.environ},
            )
        except BaseException:
            os.close(self._reading)
            self._folder.cleanup()
            raise
        finally:
            os.close(writing)
        self._send(msgspec.json.encode(job))

    def fileno(self) -> int:
        """What to wait on for news."""
        return self._reading

    def send(self, task: Task) -> None:
        """Hand out a task; a child that died meanwhile is found out by `read`."""
        self._send(msgspec.json.encode(task))

    def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()

    def read(self) -> list[Message] | None:
        """What it said since; None: it has ended."""
        block = os.read(self._reading, 1 << 20)
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
        return f"the process died with {signal_name(-status)}{_where(self._trace)}"

    def kill(self) -> None:
        """Begin to end it and all that it started."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill it, if it still runs, and wait for that."""
        stdin = self._process.stdin
        if stdin is None or stdin.closed:
            return
        with contextlib.suppress(BrokenPipeError):
            stdin.close()
        self.kill()
        self._process.wait()
        os.close(self._reading)
        self._folder.cleanup()


def hangs(seconds: float) -> str:
    """Why a child that said nothing for so long is given up, in words."""
    return f"nothing came back for {seconds:g} s: the kernel hangs (--timeout)"


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


def _where(trace: Path) -> str:
    """ " in f (kernel.py:12)": the innermost frame outside installed packages, as faulthandler saw it."""
    try:
        frames = _FRAME.findall(trace.read_text(errors="replace"))
    except OSError:
        return ""
    own = [frame for frame in frames if "site-packages" not in frame[0] and "/lib/python" not in frame[0]]
    for file, line, function in (own or frames)[:1]:
        return f" in {function} ({Path(file).name}:{line})"
    return ""
