"""A process that has imported what takes long and forks a worker whenever one is asked for. No torch here.

Importing torch and its compiler takes many seconds on every core that does it; a fork has them at once. The
kernel's own module is loaded after the fork: it may touch a GPU or start threads, and neither survives one.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from bridge.errors import KernelError
from bridge.verify.child import MIN_LOADING_SECONDS, Child, Pipes, hangs, raise_refusal, spawn
from bridge.verify.request import Broke, Job, Phase, Refused
from bridge.verify.tasks import Message, Opened

#: Elsewhere a fork of a process with native libraries is not safe, or there is none.
FORKS = sys.platform == "linux"

_LONGEST = 4096


class Nursery:
    """This process's handle on it."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._forks = False
        self._used = False
        if FORKS:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._first = spawn(job, nursery=theirs.fileno())
        else:
            self._socket = socket.socket()
            self._first = spawn(job)

    def open(self, say: Callable[[Phase], None], timeout: float) -> list[Message]:
        """Wait until it can give workers.

        Returns:
            What it said afterwards, as a worker.

        Raises:
            BridgeError: it died, or could not load torch.
        """
        until = time.monotonic() + max(timeout, MIN_LOADING_SECONDS)
        while True:
            left = until - time.monotonic()
            reason = None
            if left <= 0 or not select.select([self._first], [], [], left)[0]:
                reason = hangs(max(timeout, MIN_LOADING_SECONDS))
            elif (said := self._first.read()) is None:
                reason = self._first.how_it_ended()
            else:
                for place, message in enumerate(said, 1):
                    if isinstance(message, Phase):
                        say(message)
                    elif isinstance(message, Refused | Broke):
                        raise_refusal(message)
                    elif isinstance(message, Opened):
                        self._forks = message.forks
                        return said[place:]
            if reason is not None:
                text = f"while loading, {reason}; --in-process runs the kernel under a debugger"
                raise KernelError(text)

    def worker(self) -> Child:
        """Another worker; where it cannot fork, itself first, then processes that load all anew.

        Raises:
            KernelError: the process has died.
        """
        if self._forks:
            pipes = Pipes()
            pid = self._ask(_FORK, pipes.taken, pipes.say, pipes.trace.fileno())
            pipes.handed_over()
            if pid is None:
                pipes.close()
                raise KernelError(f"while forking, {self._first.how_it_ended()}; try --jobs 1")
            return Child(_Forked(pid, self._wait), pipes)
        if not self._used:
            self._used = True
            return self._first
        return spawn(self._job)

    def _wait(self, pid: int) -> int:
        status = self._ask(f"{_WAIT}{pid}")
        # Whatever it forked dies with it.
        return -signal.SIGKILL if status is None else status

    def _ask(self, text: str, *handed: int) -> int | None:
        """The answer; None: the process has died."""
        try:
            socket.send_fds(self._socket, [text.encode()], handed)
            answer = self._socket.recv(_LONGEST)
        except OSError:
            return None
        return int(answer) if answer else None

    def end(self) -> None:
        """End it, and with it what it forked."""
        self._socket.close()
        self._first.end()


class _Forked:
    """A process whose parent is the nursery: only that can wait for it."""

    def __init__(self, pid: int, wait: Callable[[int], int]) -> None:
        self.pid = pid
        self._wait = wait
        self._status: int | None = None

    def poll(self) -> int | None:
        return self._status

    def wait(self) -> int:
        if self._status is None:
            self._status = self._wait(self.pid)
        return self._status


#: What a nursery can be asked for: another worker, and the end of one by its number.
_FORK, _WAIT = "fork", "wait "


def preload() -> None:
    """Import what every worker will need, and what runs no code of the kernel's.

    Torch loads Dynamo at the first use of a dispatch mode, and Inductor where a Triton kernel is registered.
    """
    names = ["bridge.verify.share", "torch._dynamo"]
    # Asking torch for a GPU could start the driver, which does not survive a fork.
    if any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd")):
        names += ["triton", "torch._inductor.utils"]
    else:
        # Dynamo imports triton, which decides then whether its kernels are interpreted.
        from bridge.verify.registry import prepare_triton

        prepare_triton()
    for name in names:
        # Another version of torch may keep them elsewhere; whoever needs them imports them then.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def can_fork() -> bool:
    """Whether this process may fork workers: it uses no GPU and runs no second thread."""
    import torch

    if not FORKS or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    return len(list(Path("/proc/self/task").iterdir())) == 1


def breed(
    descriptor: int, work: Callable[[int, int, int], NoReturn], folder: Path, ready: Callable[[], None]
) -> NoReturn:
    """Fork whenever asked to, until nobody can ask any more; then leave nothing behind.

    Args:
        descriptor: of the socket on which this process is asked.
        work: what a fork does, with its pipe of tasks, its pipe of events and the file for its trace.
        folder: common to the forks; made here and removed at the end.
        ready: called when it can be asked.
    """
    alive: set[int] = set()
    folder.mkdir(mode=0o700)
    # Whoever asks may be killed at any moment, also between a question and its answer.
    with socket.socket(fileno=descriptor) as asked, contextlib.suppress(ConnectionError):
        ready()
        while _answer(asked, work, alive):
            pass
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    for pid in alive:
        os.waitpid(pid, 0)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _answer(asked: socket.socket, work: Callable[[int, int, int], NoReturn], alive: set[int]) -> bool:
    """Do what is asked for next; False: there is nobody to ask. `alive` follows the forks."""
    message, handed, _, _ = socket.recv_fds(asked, _LONGEST, 3)
    text = message.decode()
    if text.startswith(_WAIT):
        pid = int(text.removeprefix(_WAIT))
        _, status = os.waitpid(pid, 0)
        alive.discard(pid)
        asked.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    elif text:
        pid = os.fork()
        if pid == 0:
            try:
                asked.close()
                os.setpgid(0, 0)
                for end in handed:
                    # What the kernel starts must not keep the pipes open when this process is gone.
                    os.set_inheritable(end, False)
                work(*handed)
            finally:
                os._exit(1)  # Whatever happens, it is no nursery.
        alive.add(pid)
        for end in handed:
            os.close(end)
        # Both set it: whoever kills the group must find it, however early.
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        asked.sendall(str(pid).encode())
    return bool(text)
