"""Judge in child processes, so that a kernel that crashes or hangs costs one case and not the run.

One child does everything (torch is imported once), or several share the cases. When one dies, or says nothing
for `timeout` seconds, the case it was in is lost: that is the kernel's failure, and a new child goes on with
the rest. The parent imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable, Generator
from pathlib import Path

from bridge import errors
from bridge.verify.child import MIN_LOADING_SECONDS, hangs, raise_refusal, spawn
from bridge.verify.lost import gives_up, last_that_counts
from bridge.verify.pool import NotShared, judge_together
from bridge.verify.request import (
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

#: More processes than this wait for each other: for the GPU, and for the last group of cases.
MAX_JOBS = 10
#: Cores that one more process must have to be worth its start where only the declared shapes are judged.
_QUICK_CORES = 4


#: "200000 100000": two cores' worth; "max 100000": no limit.
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


class _Died(Exception):
    """The child ended without a verdict; carries why, in words, and whether it had to be ended."""

    def __init__(self, reason: str, *, hung: bool = False) -> None:
        super().__init__(reason)
        self.hung = hung


def verify_isolated(
    request: Request,
    *,
    timeout: float = 300.0,
    jobs: int | None = None,
    progress: Callable[[Event], None] | None = None,
) -> Verdict:
    """Run the judgement in child processes.

    Args:
        timeout: seconds without news after which the kernel counts as hanging.
        jobs: processes that share the cases; None: as many as cores and cases are worth. The verdict does
            not depend on it.
        progress: called with every event.

    Raises:
        BridgeError: whatever the judgement refuses, as if it had run in this process.
    """
    request.check()
    say = progress if progress is not None else _silent
    count = jobs if jobs is not None else default_jobs(request)
    if count > 1:
        with contextlib.suppress(NotShared):
            return judge_together(request, jobs=count, timeout=timeout, progress=say)
    return _judge_alone(request, timeout, say)


def default_jobs(request: Request) -> int:
    """How many processes a request is worth: one where only captured calls are judged."""
    if not request.sweep or request.target == "recorded":
        return 1
    cores = usable_cores()
    return max(1, min(MAX_JOBS, cores // _QUICK_CORES if request.quick else cores))


def usable_cores() -> int:
    """Cores that this process may keep busy: its affinity, and the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _QUOTA.read_text().split()
    except (OSError, ValueError):
        return cores  # No control group of the second kind: no quota to be read.
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def _silent(event: Event) -> None:
    """Nobody wants to know."""


def _judge_alone(request: Request, timeout: float, progress: Callable[[Event], None]) -> Verdict:
    resume = Resume()
    while True:
        at = _Place()
        try:
            with contextlib.closing(_events(Job(request=request, resume=resume), timeout)) as events:
                for event in events:
                    progress(event)
                    if isinstance(event, Finished):
                        return event.verdict
                    at.note(event)
        except _Died as died:
            resume = at.after(resume, died)


class _Place:
    """Where the child is, for the day it dies."""

    def __init__(self) -> None:
        self._case: Started | Phase | None = None
        self._phase = "loading"

    def note(self, event: Event) -> None:
        """Follow an event; raises what the child refused, and _Died for a process of no more use."""
        if isinstance(event, Started):
            self._case = event
        elif isinstance(event, Phase):
            self._case, self._phase = event if event.case else None, event.name
        elif isinstance(event, Unusable):
            raise _Died(event.reason)
        elif isinstance(event, Refused | Broke):
            raise_refusal(event)

    def after(self, resume: Resume, died: _Died) -> Resume:
        """How to go on without the case that was lost.

        Raises:
            KernelError: it was no case that killed the process.
        """
        if self._case is None:
            text = f"while {self._phase}, {died}; --in-process runs the kernel under a debugger"
            raise errors.KernelError(text)
        case, number = self._case.case, self._case.number
        lost = (*resume.lost, Lost(case=case, number=number, reason=str(died), hung=died.hung))
        # Cases before the last lost one have shown that they can be judged.
        return Resume(lost=lost, last=number if gives_up(lost) else last_that_counts(lost))


def _events(job: Job, timeout: float) -> Generator[Event, None, None]:
    """Start a child and yield what it says.

    Raises:
        _Died: it ended without a last word, or said nothing for `timeout` seconds.
    """
    child = spawn(job)
    limit = max(timeout, MIN_LOADING_SECONDS)
    try:
        while True:
            if not select.select([child], [], [], limit)[0]:
                raise _Died(hangs(limit), hung=True)
            said = child.read()
            if said is None:
                raise _Died(child.how_it_ended())
            for event in said:
                assert isinstance(event, Event)
                running = isinstance(event, Started) or (isinstance(event, Phase) and event.case != "")
                limit = timeout if running else max(timeout, MIN_LOADING_SECONDS)
                yield event
    finally:
        child.end()
