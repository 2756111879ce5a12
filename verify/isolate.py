"""Judge in a child process, so that a kernel that crashes or hangs costs one case and not the run.

One child does everything (torch is imported once). When it dies, or says nothing for `timeout` seconds, the
case it was in is lost: that is the kernel's failure, and a new child goes on with the rest. The parent
imports no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import NoReturn

import msgspec

from bridge import errors
from bridge.verify.request import (
    PLANNING,
    Broke,
    Event,
    Finished,
    Job,
    Lost,
    Phase,
    Refused,
    Request,
    Resume,
    Started,
    Unusable,
)
from bridge.verify.verdict import Verdict

#: A kernel that crashes everywhere is not worth a process per case.
MAX_LOST = 4
#: Importing torch and compiling a first kernel may take this long on a cold machine.
MIN_LOADING_SECONDS = 120.0

_PR_SET_PDEATHSIG = 1
_FRAME = re.compile(r'File "(.+?)", line (\d+) in (\w+)')
_DECODER = msgspec.json.Decoder(Event)


class _Died(Exception):
    """The child ended without a verdict; carries why, in words."""


def verify_isolated(
    request: Request, *, timeout: float = 300.0, progress: Callable[[Event], None] | None = None
) -> Verdict:
    """Run the judgement in a child process.

    Args:
        timeout: seconds without news after which the kernel counts as hanging.
        progress: called with every event.

    Raises:
        BridgeError: whatever the judgement refuses, as if it had run in this process.
    """
    request.check()
    resume = Resume()
    while True:
        at = _Place()
        try:
            with contextlib.closing(_events(Job(request=request, resume=resume), timeout)) as events:
                for event in events:
                    if progress is not None:
                        progress(event)
                    if isinstance(event, Finished):
                        return event.verdict
                    at.note(event)
        except _Died as died:
            resume = at.after(resume, str(died))


class _Place:
    """Where the child is, for the day it dies."""

    def __init__(self) -> None:
        self._case: Started | None = None
        self._phase = "loading"

    def note(self, event: Event) -> None:
        """Follow an event; raises what the child refused, and _Died for a process of no more use."""
        if isinstance(event, Started):
            self._case = event
        elif isinstance(event, Phase):
            self._case, self._phase = None, event.name
        elif isinstance(event, Unusable):
            raise _Died(event.reason)
        elif isinstance(event, Refused):
            raise getattr(errors, event.error)(event.message)
        elif isinstance(event, Broke):
            if os.environ.get("BRIDGE_DEBUG"):
                print(event.text, file=sys.stderr)
            raise RuntimeError(event.text.strip().rpartition("\n")[2])

    def after(self, resume: Resume, reason: str) -> Resume:
        """How to go on without the case that was lost.

        Raises:
            KernelError: it was no case that killed the process.
        """
        if self._case is None:
            if self._phase == PLANNING and not resume.unplanned:
                return msgspec.structs.replace(resume, unplanned=True)
            text = f"while {self._phase}, {reason}; --in-process runs the kernel under a debugger"
            raise errors.KernelError(text)
        lost = (*resume.lost, Lost(case=self._case.case, number=self._case.number, reason=reason))
        # Cases before the last lost one have shown that they can be judged.
        last = self._case.number if len(lost) >= MAX_LOST else None
        return Resume(lost=lost, last=last, unplanned=resume.unplanned)


def _events(job: Job, timeout: float) -> Generator[Event, None, None]:
    """Start a child and yield what it says.

    Raises:
        _Died: it ended without a last word, or said nothing for `timeout` seconds.
    """
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory(prefix="bridge-") as folder:
        trace = Path(folder) / "fault"
        child = subprocess.Popen(
            [sys.executable, "-m", "bridge.verify.isolate", str(writing), str(trace)],
            stdin=subprocess.PIPE,
            pass_fds=(writing,),
            # Its own group, so that whatever it started goes with it.
            start_new_session=True,
        )
        os.close(writing)
        assert child.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(msgspec.json.encode(job) + b"\n")
                child.stdin.flush()
            yield from _read(reading, timeout)
            raise _Died(_how_it_ended(child.wait(), trace))
        finally:
            os.close(reading)
            _end(child)


def _read(descriptor: int, timeout: float) -> Iterator[Event]:
    buffer = bytearray()
    limit = max(timeout, MIN_LOADING_SECONDS)
    while True:
        ready, _, _ = select.select([descriptor], [], [], limit)
        if not ready:
            raise _Died(f"nothing came back for {limit:g} s: the kernel hangs (--timeout)")
        block = os.read(descriptor, 1 << 20)
        if not block:
            return
        buffer += block
        while (end := buffer.find(b"\n")) >= 0:
            line = bytes(buffer[:end])
            del buffer[: end + 1]
            event = _DECODER.decode(line)
            running = isinstance(event, Started) or event == Phase(name=PLANNING)
            limit = timeout if running else max(timeout, MIN_LOADING_SECONDS)
            yield event


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _how_it_ended(status: int, trace: Path) -> str:
    if status >= 0:
        return f"the process ended with exit status {status} (the kernel called exit?)"
    return f"the process died with {signal_name(-status)}{_where(trace)}"


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


def _die_with_parent() -> None:
    """A hanging kernel must not outlive a command that was killed; only Linux can be asked for that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _child(descriptor: int, trace: str) -> NoReturn:
    """Entry point of the child: a Job on stdin, events on `descriptor`, everything printed to stderr."""
    _die_with_parent()
    # What a kernel prints must not mix with a document that the parent writes to stdout.
    os.dup2(2, 1)
    # Overflow and NaN are often the point of an input; the interpreter's numpy need not comment on them.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter")
    with Path(trace).open("w") as fault, os.fdopen(descriptor, "wb", buffering=0) as out:
        faulthandler.enable(fault)

        def emit(event: Event) -> None:
            rest = memoryview(msgspec.json.encode(event, enc_hook=str) + b"\n")
            while rest:
                rest = rest[out.write(rest) or 0 :]

        job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
        try:
            from bridge.verify.session import execute

            execute(job.request, emit=emit, resume=job.resume)
        except errors.BridgeError as error:
            emit(Refused(error=type(error).__name__, message=str(error)))
        except BaseException:
            emit(Broke(text=traceback.format_exc()))
    # Not sys.exit: threads or atexit handlers of the kernel's libraries must not hold the verdict up.
    os._exit(0)


if __name__ == "__main__":
    _child(int(sys.argv[1]), sys.argv[2])
