"""Several child processes judge one kernel: who does what next, and what their answers come to. No torch.

Tile sizes are looked for by all, then every worker draws all cases and takes groups of them, those that take
longest first. Cases of one group run the same compiled kernels, so that a GPU's compiler is not asked for one
twice at the same time. The verdict is the one that a single process would reach: cases count in their
order, whoever judged them and whenever.
"""

from __future__ import annotations

import math
import secrets
import select
import shutil
import tempfile
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bridge.errors import BridgeError, KernelError
from bridge.verify.child import MIN_LOADING_SECONDS, Child, error_of, hangs, raise_refusal
from bridge.verify.lost import gives_up, last_that_counts
from bridge.verify.nursery import Nursery
from bridge.verify.request import (
    DRAWING,
    PLANNING,
    WEIGHING,
    Broke,
    Declared,
    Event,
    Finished,
    Job,
    Lost,
    Phase,
    Refused,
    Request,
    Resume,
    Share,
    Started,
    Unusable,
)
from bridge.verify.tasks import (
    CAPTURED,
    Alone,
    Conclude,
    Declare,
    Drawn,
    Judged,
    Kept,
    Known,
    Loaded,
    Message,
    Observe,
    Observed,
    Opened,
    Place,
    Plan,
    Planned,
    Reply,
    Shown,
    Take,
    Task,
    Tried,
    Try,
    has_room,
)
from bridge.verify.verdict import Verdict

#: What a worker does, beside the phases that are told; shown when it dies meanwhile.
_DECLARING, _JUDGING = "declaring", "judging"

Say = Callable[[Event], None]


class NotShared(Exception):
    """Only a single process can judge this kernel; carries why, in words."""


def judge_together(request: Request, *, jobs: int, timeout: float, progress: Say) -> Verdict:
    """Judge with `jobs` processes.

    Args:
        timeout: seconds without news from a process after which the kernel counts as hanging in it.
        progress: called with every event; cases are numbered as they are taken up.

    Raises:
        BridgeError: whatever the judgement refuses.
        NotShared: it has to be done by one process.
    """
    try:
        folder = Path(tempfile.gettempdir()) / f"bridge-{secrets.token_hex(8)}"
    except OSError as error:
        raise NotShared(f"there is no folder for what was found: {error}") from error
    pool = _Pool(request, str(folder), jobs, timeout, progress)
    try:
        return pool.run()
    finally:
        pool.end()
        shutil.rmtree(folder, ignore_errors=True)


def share_out(cases: Sequence[Drawn], jobs: int, taken: Container[int] = ()) -> list[list[int]]:
    """Groups of case numbers for `jobs` workers to take from the end, where the dearest are.

    A group that would keep its worker longer than all cases keep a worker on average is cut.

    Args:
        taken: numbers that are out already.
    """
    groups: dict[str, list[int]] = {}
    for number, case in enumerate(cases, 1):
        if number not in taken:
            groups.setdefault(case.group, []).append(number)

    def cost(numbers: list[int]) -> float:
        return sum(cases[n - 1].cost for n in numbers)

    # One worker holds captured tensors, one call at a time; they are large, so it begins at once.
    captured = groups.pop(CAPTURED, [])
    fair = sum(map(cost, groups.values())) / jobs
    parts: list[list[int]] = []
    for numbers in groups.values():
        size = math.ceil(len(numbers) / math.ceil(cost(numbers) / fair))
        parts += [numbers[at : at + size] for at in range(0, len(numbers), size)]
    return sorted(parts, key=cost) + ([captured] if captured else [])


@dataclass(slots=True, eq=False)
class _Worker:
    child: Child
    does: str = "loading"  #: "" when it waits for a task
    planned: bool = False
    tells: bool = False  #: it was asked for the plan
    numbers: list[int] = field(default_factory=list)  #: taken and not yet judged
    case: Started | None = None
    heard: float = field(default_factory=time.monotonic)

    def fileno(self) -> int:
        return self.child.fileno()

    def limit(self, timeout: float) -> float:
        """Seconds without news that count as hanging."""
        if not self.does:
            return float("inf")
        running = self.case is not None or self.does == PLANNING
        return timeout if running else max(timeout, MIN_LOADING_SECONDS)


class _Pool:
    def __init__(self, request: Request, folder: str, jobs: int, timeout: float, progress: Say) -> None:
        self._nursery = Nursery(Job(request=request, resume=Resume(), share=Share(folder=folder)))
        self._jobs, self._timeout, self._say = jobs, timeout, progress
        self._workers: list[_Worker] = []
        self._dismissed: list[_Worker] = []
        self._phases: set[str] = set()
        #: Places still to be run for tile sizes; None: not known yet.
        self._observe: list[tuple[int, Place]] | None = None
        self._tiles: set[int] = set()
        self._declared: Declared | None = None
        self._known: tuple[Drawn, ...] = ()  #: cases that can be judged; before the plan, its beginning
        self._planned = False
        self._groups: list[list[int]] = []  #: those that take longest last
        self._started = 0
        self._done: dict[int, Judged] = {}
        self._tried: list[Tried] | None = None  #: wrong variants; None: none has been given out
        self._lost: list[Lost] = []
        self._refused: dict[int, BridgeError] = {}
        self._verdict: Verdict | None = None

    def run(self) -> Verdict:
        said = self._nursery.open(self._enter, self._timeout)
        for _ in range(self._jobs):
            self._start()
        for message in said:
            self._hear(self._workers[0], message)
        while self._verdict is None:
            for worker in [w for w in self._workers if not w.does]:
                self._hand_out(worker)
            self._conclude()
            self._wait()
        return self._verdict

    def end(self) -> None:
        """End every process that still runs."""
        self._dismiss(list(self._workers))
        for worker in self._dismissed:
            worker.child.end()
        self._nursery.end()

    def _start(self) -> None:
        self._workers.append(_Worker(self._nursery.worker()))

    # Work

    def _hand_out(self, worker: _Worker) -> None:
        if self._observe and self._declared is None:
            if not any(w.does == _DECLARING for w in self._workers):
                self._give(worker, _DECLARING, Declare())
        elif self._observe:
            self._enter(Phase(name=PLANNING))
            place, case = self._observe.pop(0)
            self._give(worker, PLANNING, Observe(place=place))
            worker.case = Started(case=case.case, number=case.number, total=0)
        elif any(w.does == PLANNING for w in self._workers):
            self._take(worker)
        elif not worker.planned:
            tell = not self._planned and not any(w.tells for w in self._workers)
            worker.tells = tell
            self._give(worker, DRAWING, Plan(tiles=tuple(sorted(self._tiles)), tell=tell))
        elif self._planned:
            self._take(worker)

    def _take(self, worker: _Worker) -> None:
        # What somebody runs for its tile sizes may hang there, and no case is to hang twice.
        run = {w.case.number for w in self._workers if w.does == PLANNING and w.case is not None}
        for group in [group for group in reversed(self._groups) if run.isdisjoint(group)]:
            self._groups.remove(group)
            numbers = [n for n in group if self._needed(n)]
            if numbers:
                assert self._declared is not None
                names = (self._known[n - 1].name for n in numbers)
                digests = tuple(self._declared.input_digests[name] for name in names)
                worker.numbers = numbers
                kept = tuple(one.kept for one in self._done.values() if one.kept is not None)
                self._give(worker, _JUDGING, Take(numbers=tuple(numbers), digests=digests, kept=kept))
                return

    def _give(self, worker: _Worker, what: str, task: Task) -> None:
        worker.does, worker.case, worker.heard = what, None, time.monotonic()
        worker.child.send(task)

    # What counts, in the order of the cases

    def _needed(self, number: int) -> bool:
        last = last_that_counts(self._lost)
        if gives_up(self._lost) or any(number == item.number for item in self._lost):
            return False
        return (last is None or number <= last) and all(number < n for n in self._refused)

    def _open(self) -> bool:
        """Whether a case that counts is still to be judged."""
        return any(n not in self._done and self._needed(n) for n in range(1, len(self._known) + 1))

    def _conclude(self) -> None:
        if self._declared is None or not self._planned or self._open():
            return
        if any(w.does == WEIGHING for w in self._workers):
            return
        last = None if gives_up(self._lost) else last_that_counts(self._lost)
        if self._refused and (last is None or min(self._refused) < last):
            raise self._refused[min(self._refused)]
        self._dismiss([w for w in self._workers if w.does == _JUDGING])  # What they judge does not count.
        free = [w for w in self._workers if not w.does and w.planned]
        if not free:
            if not self._workers:
                self._start()
            return
        done = [self._done[n] for n in sorted(self._done) if last is None or n <= last]
        if self._tried is None and not any(one.failed for one in done):
            self._try(free, done, self._declared)
            return
        lost = sorted(self._lost, key=lambda item: item.number)
        task = Conclude(
            declared=self._declared,
            done=tuple(one.number for one in done),
            lost=tuple(item for item in lost if last is None or item.number <= last),
            tried=None if self._tried is None else tuple(self._tried),
        )
        self._give(free[0], WEIGHING, task)
        self._dismiss([w for w in self._workers if w is not free[0]])

    def _try(self, free: Sequence[_Worker], done: Sequence[Judged], declared: Declared) -> None:
        """Share out the wrong variants too."""
        self._tried = []
        kept: list[Kept] = []
        for one in done:
            if one.kept is not None and has_room(one.kept, kept):
                kept.append(one.kept)
        numbers = tuple(k.number for k in kept)
        tiles = tuple(sorted({tile for one in done for tile in one.tiles}))
        self._enter(Phase(name=WEIGHING))
        for start, worker in enumerate(free):
            task = Try(declared=declared, numbers=numbers, tiles=tiles, start=start, step=len(free))
            self._give(worker, WEIGHING, task)

    def _dismiss(self, workers: Sequence[_Worker]) -> None:
        """Kill workers; a process on a GPU takes its time to die, and there is other work meanwhile."""
        for worker in workers:
            worker.child.kill()
            self._workers.remove(worker)
            self._dismissed.append(worker)

    # News

    def _wait(self) -> None:
        now = time.monotonic()
        left = min(w.heard + w.limit(self._timeout) - now for w in self._workers)
        ready = select.select(self._workers, [], [], max(0.0, min(left, 3600.0)))[0]
        for worker in ready:
            said = worker.child.read()
            if said is None:
                self._died(worker, worker.child.how_it_ended())
                continue
            worker.heard = time.monotonic()
            for message in said:
                if worker in self._workers:
                    self._hear(worker, message)
        for worker in list(self._workers):
            limit = worker.limit(self._timeout)
            if worker not in ready and time.monotonic() > worker.heard + limit:
                self._died(worker, hangs(limit), hung=True)

    def _hear(self, worker: _Worker, message: Message) -> None:
        if isinstance(message, Started):
            worker.case = message
            self._started += 1
            self._say(Started(case=message.case, number=self._started, total=len(self._known)))
        elif isinstance(message, Judged):
            worker.case = None
            worker.numbers.remove(message.number)
            self._done[message.number] = message
        elif isinstance(message, Unusable):
            self._died(worker, message.reason)
        elif isinstance(message, Refused) and worker.case is not None:
            # Whoever judges in order may never get here, or be refused earlier.
            self._refused[worker.case.number] = error_of(message)
            self._replace(worker)
        elif isinstance(message, Refused | Broke):
            raise_refusal(message)
        elif isinstance(message, Alone):
            raise NotShared(message.reason)
        elif isinstance(message, Declared):
            self._declared = message
            self._say(message)
        elif isinstance(message, Phase):
            self._enter(message)
        elif isinstance(message, Finished):
            self._say(message)
            self._verdict = message.verdict
        else:
            self._ready(worker, message)

    def _ready(self, worker: _Worker, reply: Reply) -> None:
        if isinstance(reply, Opened):
            return  # A worker that was not forked, on its way.
        worker.does, worker.case = "", None
        if isinstance(reply, Loaded):
            if self._observe is None:
                self._observe = list(enumerate(reply.observe))
        elif isinstance(reply, Observed):
            self._tiles.update(reply.tiles)
        elif isinstance(reply, Shown):
            assert self._tried is not None
            self._tried += reply.tried
        elif isinstance(reply, Known):
            self._known = reply.cases
            self._groups = share_out(reply.cases, self._jobs)
        elif isinstance(reply, Planned):
            worker.planned = True
            if worker.tells:
                self._planned, self._known = True, reply.cases
                self._groups = share_out(reply.cases, self._jobs, self._taken())
                if self._lost:
                    # It crashes: one by one and in order, which finds out soonest whether it does everywhere.
                    self._groups = [[n] for group in self._groups for n in group]
                    self._groups.sort(reverse=True)

    def _taken(self) -> set[int]:
        """Numbers of the cases that are judged, lost, or out with a worker."""
        out = {n for worker in self._workers for n in worker.numbers}
        return out | self._done.keys() | {item.number for item in self._lost}

    def _enter(self, phase: Phase) -> None:
        if phase.name not in self._phases:
            self._phases.add(phase.name)
            self._say(phase)

    def _died(self, worker: _Worker, reason: str, *, hung: bool = False) -> None:
        if worker.case is None:
            text = (
                f"while {worker.does or 'waiting'}, {reason}; --in-process runs the kernel under a debugger"
            )
            raise KernelError(text)
        case = worker.case
        self._lost.append(Lost(case=case.case, number=case.number, reason=reason, hung=hung))
        worker.numbers = [number for number in worker.numbers if number != case.number]
        if self._observe is not None:
            self._observe = [item for item in self._observe if self._needed(item[1].number)]
        self._replace(worker)

    def _replace(self, worker: _Worker) -> None:
        """Put back what a lost worker had not judged; a new one takes its place when there is work for it."""
        if worker.numbers:
            self._groups.append(worker.numbers)
        self._dismiss([worker])
        if not self._planned or any(self._needed(n) for group in self._groups for n in group):
            self._start()
