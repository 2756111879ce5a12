"""One judgement from request to verdict: load, bind, declare, plan, judge, replay, assemble."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from bridge.errors import KernelError, SpecError
from bridge.verify import assemble, drawn, fallback, provenance, recorded, registry, replay, sites
from bridge.verify.bind import Bindings, bind_cases
from bridge.verify.case import Case
from bridge.verify.entries import Announced, Entry, entry_of, one_thread
from bridge.verify.judge import constants_of, judge
from bridge.verify.loading import check_choices, load, refuse_torn
from bridge.verify.lost import not_judged
from bridge.verify.options import Options
from bridge.verify.plan import observe_tiles, plan_cases
from bridge.verify.registry import LoadedSpec
from bridge.verify.request import (
    DRAWING,
    PLANNING,
    Declared,
    Emit,
    Event,
    Finished,
    Lost,
    Phase,
    Request,
    Resume,
    Unusable,
)
from bridge.verify.spec import KernelSpec
from bridge.verify.verdict import Constants, Provenance, Verdict
from bridge.verify.weigh import Judgement

if TYPE_CHECKING:
    from bridge.capture.store import Capture


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """What is known before the target runs at all."""

    bound: Bindings
    options: Options
    stamp: Provenance
    real: tuple[Entry, ...]
    drawn: tuple[Case, ...]  #: declared shapes
    observe: tuple[Case, ...]  #: of those, the ones to run for tile sizes; (): nothing depends on any

    def plan(self) -> Plan:
        """What can be judged before tile sizes are known; every plan begins with it."""
        return Plan(entries=(*self.real, *map(entry_of, self.drawn)), bound=self.bound, options=self.options)

    def places(self) -> list[tuple[int, Case]]:
        """Numbers that the observed cases will have, and the cases."""
        return list(enumerate(self.observe, len(self.real) + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Every case of a judgement, in order, and how it is to be judged."""

    entries: tuple[Entry, ...]
    bound: Bindings
    options: Options


def execute(
    request: Request,
    *,
    emit: Emit | None = None,
    resume: Resume | None = None,
    loaded: LoadedSpec | None = None,
    capture: Capture | None = None,
) -> Verdict:
    """Judge what the request asks for, in this process.

    Args:
        emit: told what is being done, the declaration before the target runs, and the verdict at the end.
        resume: what earlier processes of the same judgement lost.
        loaded: a spec that the caller already has.
        capture: an open capture in place of `request.capture`.

    Raises:
        BridgeError: something of the request cannot be served, or the kernel raised.
    """
    say = emit if emit is not None else silent
    session = open_session(request, say, resume or Resume(), loaded, capture)
    try:
        with one_thread():
            verdict = session.run()
    except KernelError as error:
        tell_broken(error, say)
        raise
    say(Finished(verdict=verdict))
    return verdict


def tell_broken(error: KernelError, say: Emit) -> None:
    """Say that this process is of no more use when the kernel's error broke the GPU's context."""
    if "CUDA error" in str(error):
        say(Unusable(reason=str(error)))


def open_session(
    request: Request,
    say: Emit,
    resume: Resume,
    loaded: LoadedSpec | None = None,
    capture: Capture | None = None,
) -> Session:
    """Load the kernel and the capture of a request.

    Raises:
        BridgeError: as `execute`.
    """
    request.check(named=loaded is None)
    say(Phase(name="loading"))
    if capture is None and request.capture is not None:
        from bridge.capture.store import load_capture

        capture = load_capture(request.capture, salvage=request.partial)
    if capture is not None:
        refuse_torn(capture, partial=request.partial)
    if loaded is None:
        loaded = load(request, capture)
    return Session(request, loaded, capture, say, resume)


def prepare(
    request: Request, *, spared: Collection[str] = ()
) -> tuple[LoadedSpec, Declared, tuple[Entry, ...]]:
    """The kernel, the declaration and every case of a request, without judging; what `execute` starts from.

    Args:
        spared: cases that are not run for tile sizes, since they would end this process.

    Raises:
        BridgeError: as `execute`.
    """
    lost = tuple(Lost(case=name, number=0, reason="") for name in spared)
    session = open_session(request, silent, Resume(lost=lost))
    with one_thread():
        plan, declared = session.prepare()
    return session.loaded, declared, plan.entries


def silent(event: Event) -> None:
    """Nobody wants to know."""


@dataclass(slots=True)
class Session:
    """A judgement under way; its stages run in one process, or each in the one that it falls to."""

    request: Request
    loaded: LoadedSpec
    capture: Capture | None
    say: Emit
    resume: Resume
    _threads: int = field(default_factory=torch.get_num_threads)
    _captured: dict[str, tuple[str, ...]] = field(default_factory=dict)  #: digests of captured cases

    @property
    def constants(self) -> Constants:
        """The gate's: those asked for, else the spec's."""
        return self.request.constants.over(constants_of(self.spec))

    @property
    def spec(self) -> KernelSpec:
        return self.loaded.spec

    def run(self) -> Verdict:
        plan, declared = self.prepare()
        lost = {item.case for item in self.resume.lost}
        last = self.resume.last or len(plan.entries)
        kept = [(n, e) for n, e in enumerate(plan.entries, 1) if e.name not in lost and n <= last]
        replayed: list[replay.Replayed] = []

        def done(case: Case) -> None:
            found = self.replayed(case, plan.options)
            if found is not None:
                replayed.append(found)

        found: Judgement | None = None
        if kept:
            taken = Announced(kept, self.say, len(plan.entries), done, self.threads)
            found = judge(self.spec, taken, constants=declared.constants, options=plan.options)
        return self.conclude(plan, declared, found, replayed, {entry.name for _, entry in kept})

    def prepare(self) -> tuple[Plan, Declared]:
        """Bind, plan and declare; the target runs for the first time while tile edges are planned."""
        begun = self.begin()
        tiles: tuple[int, ...] = ()
        if begun.observe:
            # What is known without running the target is declared before it runs.
            self.say(self.declare_drawn(begun))
            tiles = self._observe(begun)
            self.say(Phase(name=DRAWING))
        plan = self.plan(begun, tiles)
        declared = self.declare(begun, plan.entries)
        self.say(declared)
        return plan, declared

    def _observe(self, begun: Begun) -> tuple[int, ...]:
        lost, last = {item.case for item in self.resume.lost}, self.resume.last
        seen: set[int] = set()
        for number, case in begun.places():
            if case.name not in lost and (last is None or number <= last):
                self.say(Phase(name=PLANNING, case=case.name, number=number))
                seen.update(observe_tiles(self.spec, [case]))
        return tuple(sorted(seen))

    def begin(self) -> Begun:
        """Bind captured calls and draw the declared shapes."""
        request = self.request
        check_choices(self.spec, request)
        stamp = provenance.make_provenance(self.loaded, request)
        bound = self._bind()
        options = Options(seed=request.seed, sweeps=request.sweep, recorded=request.target == "recorded")
        if options.recorded:
            spec, bound = recorded.only_recorded(self.spec, bound)
            self.loaded = replace(self.loaded, spec=spec)
        real = [Entry(name=item.name, family="captured", load=item.load) for item in bound.bound]
        known: list[Case] = []
        observe: list[Case] = []
        if request.sweep and self.loaded.origin == "override":
            text = "drawn inputs and tile edges: an override has no spec that says how to draw them"
            bound = replace(bound, left_out=(*bound.left_out, text))
        elif request.sweep and not options.recorded:
            known = self._draw(replace(options, sweeps=False), ())
            if not request.quick:
                observe = known[: len(request.shapes or self.spec.shapes)]
        return Begun(
            bound=bound,
            options=options,
            stamp=stamp,
            real=tuple(real),
            drawn=tuple(known),
            observe=tuple(observe),
        )

    def plan(self, begun: Begun, tiles: tuple[int, ...]) -> Plan:
        """Every case, with edges at `tiles`."""
        cases = self._draw(begun.options, tiles) if begun.observe else begun.drawn
        return Plan(entries=(*begun.real, *map(entry_of, cases)), bound=begun.bound, options=begun.options)

    def declare(self, begun: Begun, entries: Sequence[Entry]) -> Declared:
        """What is fixed before the target runs on `entries`."""
        digests = {entry.name: self._digests(entry) for entry in entries}
        return provenance.declare(self.loaded, self.request, digests, begun.stamp)

    def declare_drawn(self, begun: Begun) -> Declared:
        """What can be fixed before the target runs at all."""
        return self.declare(begun, begun.plan().entries)

    def _digests(self, entry: Entry) -> tuple[str, ...]:
        if entry.family != "captured":
            return provenance.case_digests(entry.load())
        if entry.name not in self._captured:
            self._captured[entry.name] = provenance.case_digests(entry.load())
        return self._captured[entry.name]

    def threads(self, entry: Entry) -> AbstractContextManager[None]:
        """Captured tensors are large, and are replayed on as many threads as their run had."""
        return one_thread(self._threads if entry.family == "captured" else 1)

    def replayed(self, case: Case, options: Options) -> replay.Replayed | None:
        """A captured case against its record."""
        return replay.replay(self.spec, case) if case.family == "captured" and not options.recorded else None

    def _bind(self) -> Bindings:
        request, spec = self.request, self.spec
        if self.capture is None:
            return Bindings()
        # The op of an override or of a pair of functions has gone into the spec's sites.
        made = self.loaded.origin in ("override", "functions")
        op = request.op if request.op != spec.name and not made else None
        if op is not None and op in registry.known_names():
            # A variant of a known kernel is judged where the known one occurs.
            spec = replace(spec, sites=spec.sites or registry.load_spec(op).spec.sites)
            op = None
        return bind_cases(
            self.capture,
            spec,
            op=request.call or op,
            max_calls=request.max_calls,
            seed=request.seed,
            device=_device(),
        )

    def _draw(self, options: Options, tiles: tuple[int, ...]) -> list[Case]:
        spec = replace(self.spec, shapes=self.request.shapes) if self.request.shapes else self.spec
        try:
            return plan_cases(
                spec,
                dtypes=self.request.dtypes or None,
                seed=self.request.seed,
                device=_device(),
                options=options,
                tiles=tiles,
            )
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
            raise SpecError(
                f"KernelSpec {spec.name}: drawing inputs raised {type(error).__name__}: {error}; "
                "check `sample` and `reference`"
            ) from error

    def conclude(
        self,
        plan: Plan,
        declared: Declared,
        found: Judgement | None,
        replayed: Sequence[replay.Replayed],
        tried: Collection[str],
    ) -> Verdict:
        """The verdict, from what judging found and what was lost on the way.

        Args:
            tried: names of the cases that were taken up and not lost.

        Raises:
            KernelError: the target raised on every case, so that nothing was judged.
        """
        lost = {item.case: item for item in self.resume.lost}
        entries, options = plan.entries, plan.options
        if found is not None and found.never_ran is not None and not lost:
            raise KernelError(found.never_ran)
        silent = found.raised if found is not None else frozenset()
        first = next((e for e in entries if e.name in tried and e.name not in silent), None)
        beyond = sum(e.name not in tried and e.name not in lost for e in entries)
        kernels = self._kernels(plan.bound, found, options)
        fidelity = replay.summarise(
            replayed,
            captured=len(plan.bound.bound),
            captured_on=self.capture.manifest.device if self.capture is not None else "",
            here=declared.provenance.device,
            kernels=kernels,
            recorded=options.recorded,
        )
        return assemble.assemble(
            self.spec,
            found,
            declared=declared,
            fidelity=fidelity,
            lost=[(entry.load(), lost[entry.name]) for entry in entries if entry.name in lost],
            left_out=self._left_out(plan.bound, beyond=beyond),
            fallback=None if first is None else self._fallback(first, kernels, options),
            drawn=self._drawn(entries, found),
        )

    def _left_out(self, bound: Bindings, *, beyond: int) -> list[str]:
        told = list(bound.left_out)
        if self.request.quick and self.request.sweep:
            told.append("tile edges, adversarial values and layouts (--quick)")
        if beyond:
            told.append(not_judged(self.resume.lost, beyond))
        if self.capture is not None:
            told += [f"capture: {text}" for text in self.capture.problems]
        return told

    def _kernels(self, bound: Bindings, found: Judgement | None, options: Options) -> tuple[str, ...]:
        if options.recorded:
            assert self.capture is not None
            return sites.kernels_inside(self.capture, bound.calls)
        return found.kernels if found is not None else ()

    def _fallback(self, first: Entry, kernels: tuple[str, ...], options: Options) -> str | None:
        name = self.spec.name
        if kernels:
            return None
        if options.recorded:
            return f"{name}: the run launched no kernel in the captured calls: they hold no kernel's output"
        return fallback.complaint(self.spec, first.load())

    def _drawn(self, entries: Sequence[Entry], found: Judgement | None) -> tuple[str, ...]:
        """Told when a captured call fails and everything that `sample` alone draws passes."""
        if found is None:
            return ()
        failed = {record.name for record in found.cases if record.verdict == "FAIL"}
        declared = [entry for entry in entries if entry.family == "declared"]
        real = [entry for entry in entries if entry.family == "captured" and entry.name in failed]
        if not real or not declared or any(entry.name in failed for entry in declared):
            return ()
        return drawn.compare(self.spec, [real[0].load()], [entry.load() for entry in declared])


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
