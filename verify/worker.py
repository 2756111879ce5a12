"""The child process: everything in it, or the tasks that the process above hands out.

A job on stdin, then tasks, one JSON line each; events and replies on a pipe of their own.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import msgspec

from bridge import errors
from bridge.verify.request import Broke, Job, Refused
from bridge.verify.tasks import Message, Task

_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """A hanging kernel must not outlive a command that was killed; only Linux can be asked for that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _main(descriptor: int, trace: str) -> NoReturn:
    _die_with_parent()
    # What a kernel prints must not mix with a document that the parent writes to stdout.
    os.dup2(2, 1)
    # Overflow and NaN are often the point of an input; the interpreter's numpy need not comment on them.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter")
    with Path(trace).open("w") as fault, os.fdopen(descriptor, "wb", buffering=0) as out:
        faulthandler.enable(fault)

        def emit(message: Message) -> None:
            rest = memoryview(msgspec.json.encode(message, enc_hook=str) + b"\n")
            while rest:
                rest = rest[out.write(rest) or 0 :]

        job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
        try:
            _judge(job, emit)
        except errors.BridgeError as error:
            emit(Refused(error=type(error).__name__, message=str(error)))
        except BaseException:
            emit(Broke(text=traceback.format_exc()))
    # Not sys.exit: threads or atexit handlers of the kernel's libraries must not hold the verdict up.
    os._exit(0)


def _judge(job: Job, emit: Callable[[Message], None]) -> None:
    if job.share is None:
        from bridge.verify.session import execute

        execute(job.request, emit=emit, resume=job.resume)
    else:
        from bridge.verify.share import serve

        serve(job, job.share, emit, _tasks())


def _tasks() -> Iterator[Task]:
    decoder: msgspec.json.Decoder[Task] = msgspec.json.Decoder(Task)
    for line in sys.stdin.buffer:
        yield decoder.decode(line)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2])
