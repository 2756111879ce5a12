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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NoReturn

import msgspec

from bridge import errors
from bridge.verify.kernelfile import see_folder
from bridge.verify.request import Broke, Job, Refused, Share
from bridge.verify.tasks import Message, Opened, Task

_PR_SET_PDEATHSIG = 1


def _die_with_parent(*, never: bool = False) -> None:
    """A hanging kernel must not outlive a command that was killed; only Linux can be asked for that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0 if never else signal.SIGKILL)


def _speak(descriptor: int, trace: int, work: Callable[[Callable[[Message], None]], None]) -> NoReturn:
    """Do `work` with a function that sends messages; what goes wrong is a message too."""
    with os.fdopen(descriptor, "wb", buffering=0) as out:
        faulthandler.enable(trace)

        def emit(message: Message) -> None:
            rest = memoryview(msgspec.json.encode(message, enc_hook=str) + b"\n")
            while rest:
                rest = rest[out.write(rest) or 0 :]

        try:
            work(emit)
        except errors.BridgeError as error:
            emit(Refused(error=type(error).__name__, message=str(error)))
        except BaseException:
            emit(Broke(text=traceback.format_exc()))
    # Not sys.exit: threads or atexit handlers of the kernel's libraries must not hold the verdict up.
    os._exit(0)


def _main(descriptor: int, trace: int, nursery: int | None) -> NoReturn:
    _die_with_parent()
    see_folder()
    # What a kernel prints must not mix with a document that the parent writes to stdout.
    os.dup2(2, 1)
    # Overflow and NaN are often the point of an input; the interpreter's numpy need not comment on them.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter")
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)

    def work(emit: Callable[[Message], None]) -> None:
        if job.share is None:
            from bridge.verify.session import execute

            execute(job.request, emit=emit, resume=job.resume)
        else:
            _work_with_others(job, job.share, emit, descriptor, nursery)

    _speak(descriptor, trace, work)


def _work_with_others(
    job: Job, share: Share, emit: Callable[[Message], None], descriptor: int, nursery: int | None
) -> None:
    from bridge.verify.nursery import breed, can_fork, preload

    above = os.getppid()
    preload()
    here = os.getpid()

    def fork(tasks: int, events: int, trace: int) -> NoReturn:
        _die_with_parent()
        os.close(descriptor)
        if os.getppid() != here:
            os._exit(1)  # The nursery died in between, and nobody would end this process.
        with os.fdopen(tasks, "rb") as taken:
            _speak(events, trace, lambda say: _share(job, share, say, taken))

    folder = Path(share.folder)
    if nursery is not None and can_fork():
        # From here on it runs no code of the kernel's, cannot hang, and clears up after a killed command.
        _die_with_parent(never=True)
        if os.getppid() != above:
            os._exit(1)
        breed(nursery, fork, folder, lambda: emit(Opened(forks=True)))
    folder.mkdir(mode=0o700, exist_ok=True)
    emit(Opened(forks=False))
    _share(job, share, emit, sys.stdin.buffer)


def _share(job: Job, share: Share, emit: Callable[[Message], None], tasks: Iterable[bytes]) -> None:
    from bridge.verify.share import serve

    serve(job, share, emit, _tasks(tasks))


def _tasks(lines: Iterable[bytes]) -> Iterator[Task]:
    decoder: msgspec.json.Decoder[Task] = msgspec.json.Decoder(Task)
    for line in lines:
        yield decoder.decode(line)


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
