"""One worker's part of a judgement that several processes share: tasks in, replies out.

Every worker loads the kernel and draws the same cases from the same seed; which of them it judges is the
process above's choice. What it finds lies in a common folder, for the worker that puts the verdict together.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from bridge.errors import KernelError
from bridge.verify.case import Case
from bridge.verify.entries import Entry, one_thread, settle
from bridge.verify.judge import judge_case
from bridge.verify.plan import OWN_FAMILIES, observe_tiles
from bridge.verify.power import power_of, try_variants
from bridge.verify.provenance import case_digests
from bridge.verify.replay import Replayed
from bridge.verify.request import WEIGHING, Finished, Job, Phase, Resume, Share, Started
from bridge.verify.session import Begun, Plan, Session, open_session, tell_broken
from bridge.verify.tasks import (
    CAPTURED,
    Alone,
    Conclude,
    Declare,
    Drawn,
    Free,
    Judged,
    Kept,
    Known,
    Loaded,
    Message,
    Observe,
    Observed,
    Place,
    Planned,
    Shown,
    Take,
    Task,
    Try,
)
from bridge.verify.tasks import Plan as Planning
from bridge.verify.weigh import JudgedCase, keep_little, kept_of, weigh, worth_keeping

#: Estimates, in units of a small case: elements that take as long, and a compilation.
_UNIT_ELEMENTS = 4096
_COMPILE_COST = 16.0


@dataclass(slots=True, kw_only=True)
class Part:
    """What judging one case left; judged: None when the case was dropped."""

    judged: JudgedCase | None
    replayed: Replayed | None


def serve(job: Job, share: Share, emit: Callable[[Message], None], tasks: Iterable[Task]) -> None:
    """Load the kernel, and answer tasks until there are no more.

    Raises:
        BridgeError: as `session.execute`.
    """
    if torch.cuda.is_available():
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            emit(Alone(reason=f"a forked process cannot use the GPU: {error}"))
            return
    session = open_session(job.request, emit, job.resume)
    try:
        with one_thread():
            _Worker(session, share, emit).serve(tasks)
    except KernelError as error:
        tell_broken(error, emit)
        raise


class _Worker:
    def __init__(self, session: Session, share: Share, emit: Callable[[Message], None]) -> None:
        self._session = session
        self._share = share
        self._emit = emit
        self._plan: Plan | None = None  #: None: nothing is drawn yet

    def serve(self, tasks: Iterable[Task]) -> None:
        session, emit = self._session, self._emit
        begun = session.begin()
        self._plan = begun.plan()
        emit(Loaded(observe=tuple(Place(case=case.name, number=n) for n, case in begun.places())))
        for task in tasks:
            if isinstance(task, Declare):
                emit(session.declare_drawn(begun))
                emit(Known(cases=_drawn(self._plan.entries, begun.observe)))
            elif isinstance(task, Observe):
                emit(Observed(tiles=observe_tiles(session.spec, [begun.observe[task.place]])))
            elif isinstance(task, Take):
                self._take(task)
            elif isinstance(task, Try):
                self._try(task)
            elif isinstance(task, Conclude):
                self._conclude(task)
            else:
                self._draw(begun, task)

    def _draw(self, begun: Begun, task: Planning) -> None:
        self._plan = self._session.plan(begun, task.tiles)
        if task.tell:
            self._emit(self._session.declare(begun, self._plan.entries))
        self._emit(Planned(cases=_drawn(self._plan.entries) if task.tell else ()))

    def _take(self, task: Take) -> None:
        assert self._plan is not None
        entries, kept = self._plan.entries, list(task.kept)
        for number, digests in zip(task.numbers, task.digests, strict=True):
            entry = entries[number - 1]
            if entry.family != "captured" and case_digests(entry.load()) != digests:
                self._emit(Alone(reason=f"`sample` draws other inputs for {entry.name} in another process"))
                return
            self._emit(Started(case=entry.name, number=number, total=len(entries)))
            part = self._judge(entry)
            left = self._kept(part, number, kept)
            try:
                torch.save(part, self._file(number))
            except (pickle.PicklingError, AttributeError, TypeError, OSError, RuntimeError) as error:
                # Nothing that can be pickled, or no room on the disk.
                self._emit(Alone(reason=f"what {entry.name} holds cannot be passed on: {error}"))
                return
            self._emit(_told(part, number, left))
        self._emit(Free())

    def _judge(self, entry: Entry) -> Part:
        assert self._plan is not None
        session, options = self._session, self._plan.options
        with session.threads(entry):
            case = entry.load()
            judged = judge_case(session.spec, case, constants=session.constants, options=options)
            settle(case, self._emit)
            return Part(judged=judged, replayed=session.replayed(case, options))

    def _kept(self, part: Part, number: int, kept: list[Kept]) -> Kept | None:
        """Keep the tensors of a case only when no judgement in order could do without them."""
        if part.judged is None or part.judged.evidence is None:
            return None
        own = kept_of(part.judged.evidence, number)
        if not worth_keeping(part.judged.evidence, [k for k in kept if k.number < number]):
            part.judged.evidence = None
            return None
        kept.append(own)
        return own

    def _try(self, task: Try) -> None:
        evidence = [part.judged.evidence for part in map(self._part, task.numbers) if part.judged is not None]
        tried = try_variants(
            self._session.spec,
            [e for e in evidence if e is not None],
            task.declared.constants,
            task.tiles,
            start=task.start,
            step=task.step,
        )
        self._emit(Shown(tried=tuple(tried)))

    def _conclude(self, task: Conclude) -> None:
        assert self._plan is not None
        session, plan = self._session, self._plan
        session.resume = Resume(lost=task.lost)
        self._emit(Phase(name=WEIGHING))
        judged: list[JudgedCase] = []
        replayed: list[Replayed] = []
        for number in task.done:
            part = self._part(number)
            if part.judged is not None:
                keep_little(part.judged, judged)
                judged.append(part.judged)
            if part.replayed is not None:
                replayed.append(part.replayed)
        constants = task.declared.constants
        found = None
        if task.done:
            power = None if task.tried is None else power_of(task.tried)
            found = weigh(session.spec, judged, constants=constants, options=plan.options, power=power)
        tried = {plan.entries[number - 1].name for number in task.done}
        verdict = session.conclude(plan, task.declared, found, replayed, tried)
        self._emit(Finished(verdict=verdict))

    def _part(self, number: int) -> Part:
        # Written by a worker of this judgement a moment ago; it holds our own classes.
        part = torch.load(self._file(number), weights_only=False)
        assert isinstance(part, Part)
        return part

    def _file(self, number: int) -> Path:
        return Path(self._share.folder) / f"{number}.part"


def _told(part: Part, number: int, kept: Kept | None) -> Judged:
    judged = part.judged
    if judged is None:
        return Judged(number=number, kept=kept)
    failed = any(tensor.verdict == "FAIL" for tensor in judged.tensors)
    return Judged(number=number, kept=kept, failed=failed, tiles=judged.tiles)


def _drawn(entries: Iterable[Entry], run: Iterable[Case] = ()) -> tuple[Drawn, ...]:
    """How cases are shared out: by the length of their rows, since tiles follow it.

    Args:
        run: cases for which somebody has the kernels compiled anyway.
    """
    found = []
    seen = {(case.dtype, case.inputs[0].shape) for case in run}
    for entry in entries:
        if entry.family == "captured":
            found.append(Drawn(name=entry.name, group=CAPTURED, cost=1.0))
            continue
        case = entry.load()
        first = case.inputs[0]
        columns = int(first.shape[-1]) if first.ndim else 1
        length = f"{columns}" if columns & (columns - 1) == 0 else f"{columns.bit_length()} bits"
        if first.is_cuda:
            # Compiling for another shape takes far longer than running it.
            cost = 1.0 if (case.dtype, first.shape) in seen else _COMPILE_COST
        else:
            runs = 3 if entry.family in OWN_FAMILIES else 1
            cost = runs * (1 + sum(tensor.numel() for tensor in case.inputs) / _UNIT_ELEMENTS)
        seen.add((case.dtype, first.shape))
        found.append(Drawn(name=entry.name, group=f"{case.dtype} {length}", cost=cost))
    return tuple(found)
