"""One judgement from request to verdict: load, bind, declare, plan, judge, replay, assemble."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, overload

import torch

from bridge.environment import device_name
from bridge.errors import CaptureError, KernelError, SpecError, UsageError, near_misses
from bridge.verify import assemble, drawn, fallback, provenance, recorded, registry, replay, sites
from bridge.verify.bind import Bindings, bind_cases
from bridge.verify.case import Case
from bridge.verify.judge import Judgement, judge
from bridge.verify.options import Options
from bridge.verify.plan import plan_cases
from bridge.verify.registry import LoadedSpec
from bridge.verify.request import (
    PLANNING,
    Declared,
    Emit,
    Event,
    Finished,
    Phase,
    Request,
    Resume,
    Started,
    Unusable,
)
from bridge.verify.spec import KernelSpec
from bridge.verify.verdict import Verdict

if TYPE_CHECKING:
    from bridge.capture.store import Capture

#: How often a captured case is read again is cheap; holding all of them is not.
Load = Callable[[], Case]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A planned case; captured ones are read when they are taken up and let go afterwards."""

    name: str
    family: str
    load: Load


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
    say = emit if emit is not None else _silent
    session = _open(request, say, resume or Resume(), loaded, capture)
    try:
        verdict = session.run()
    except KernelError as error:
        if "CUDA error" in str(error):
            say(Unusable(reason=str(error)))
        raise
    say(Finished(verdict=verdict))
    return verdict


def _open(
    request: Request, say: Emit, resume: Resume, loaded: LoadedSpec | None, capture: Capture | None
) -> _Session:
    request.check(named=loaded is None)
    say(Phase(name="loading"))
    if capture is None and request.capture is not None:
        from bridge.capture.store import load_capture

        capture = load_capture(request.capture)
    if capture is not None:
        _refuse_torn(capture, partial=request.partial)
    if loaded is None:
        loaded = load(request, capture)
    return _Session(request, loaded, capture, say, resume)


def prepare(request: Request) -> tuple[LoadedSpec, Declared, list[Entry]]:
    """The kernel, the declaration and every case of a request, without judging; what `execute` starts from.

    Raises:
        BridgeError: as `execute`.
    """
    session = _open(request, _silent, Resume(), None, None)
    entries, _, _, declared = session.prepare()
    return session.loaded, declared, entries


def _refuse_torn(capture: Capture, *, partial: bool) -> None:
    """A capture whose writer died is judged only on request: what it lacks may be what diverged."""
    torn = [text for text in capture.problems if text not in capture.manifest.problems]
    if not capture.calls:
        raise CaptureError(
            f"{capture.path} holds no calls{': ' + torn[0] if torn else ''}; capture the step again"
        )
    if torn and not partial:
        raise CaptureError(f"{capture.path}: {torn[0]}; capture again, or judge what is there with --partial")


def load(request: Request, capture: Capture | None) -> LoadedSpec:
    """The spec that a request names, or one made for an override or a pair of functions."""
    if request.kernel is not None:
        return _load_file(request, request.kernel)
    if request.reference is not None and request.target_fn is not None:
        from bridge.verify.pair import pair_spec

        return pair_spec(
            request.reference,
            request.target_fn,
            op=request.op,
            capture=capture,
            shapes=request.shapes,
            dtypes=request.dtypes,
        )
    if request.op is None:
        raise UsageError("nothing to judge: name a kernel with --op NAME or --kernel FILE")
    if capture is not None and request.op not in registry.known_names():
        from bridge.verify import auto

        name = request.op if "." in request.op else auto.site_override(request.op, capture)
        if name is not None:
            return auto.override_spec(name, capture)
    return registry.load_spec(request.op)


def _load_file(request: Request, kernel: str) -> LoadedSpec:
    loaded = registry.load_spec(kernel, op=request.op)
    known = (loaded.spec.name, *registry.known_names())
    if request.op is not None and request.capture is None and request.op not in known:
        raise UsageError(
            f"--op {request.op!r} is not the kernel in {kernel}; {near_misses(request.op, known)}"
        )
    return loaded


def _silent(event: Event) -> None:
    """Nobody wants to know."""


class _Announced(Sequence[Case]):
    """Cases that say so when they are taken up: `judge` works through them one by one.

    This is how the process above knows which case a crash belongs to.
    """

    def __init__(
        self, entries: Sequence[tuple[int, Entry]], say: Emit, total: int, done: Callable[[Case], None]
    ) -> None:
        self._entries = entries
        self._say = say
        self._total = total
        self._done = done

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> Case: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Case]: ...
    def __getitem__(self, index: int | slice) -> Case | Sequence[Case]:
        if isinstance(index, slice):
            return [entry.load() for _, entry in self._entries[index]]
        return self._entries[index][1].load()

    def __iter__(self) -> Iterator[Case]:
        for number, entry in self._entries:
            self._say(Started(case=entry.name, number=number, total=self._total))
            case = entry.load()
            yield case
            self._settle(case)
            self._done(case)
        self._say(Phase(name="weighing the evidence"))

    def _settle(self, case: Case) -> None:
        """Find an illegal access on a GPU now, while it is known which case it belongs to."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            self._say(Unusable(reason=reason))
            raise KernelError(f"the target broke the GPU context on {case.name}: {reason}") from error


@dataclass(slots=True)
class _Session:
    request: Request
    loaded: LoadedSpec
    capture: Capture | None
    say: Emit
    resume: Resume

    @property
    def spec(self) -> KernelSpec:
        return self.loaded.spec

    def run(self) -> Verdict:
        return self._judge(*self.prepare())

    def prepare(self) -> tuple[list[Entry], Bindings, Options, Declared]:
        """Bind, plan and declare; the target runs for the first time while tile edges are planned."""
        request = self.request
        self._check_choices()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        stamp = provenance.make_provenance(self.loaded, request)
        bound = self._bind(device)
        options = Options(seed=request.seed, sweeps=request.sweep, recorded=request.target == "recorded")
        if options.recorded:
            spec, bound = recorded.only_recorded(self.spec, bound)
            self.loaded = replace(self.loaded, spec=spec)
        real = [Entry(name=item.name, family="captured", load=item.load) for item in bound.bound]
        digests = {entry.name: provenance.case_digests(entry.load()) for entry in real}
        drawn: list[Case] = []
        if request.sweep and self.loaded.origin == "override":
            text = "drawn inputs and tile edges: an override has no spec that says how to draw them"
            bound = replace(bound, left_out=(*bound.left_out, text))
        elif request.sweep and not options.recorded:
            # Tile edges are found by running the target, so what is known without it is declared first.
            drawn = self._plan(device, replace(options, sweeps=False))
            known = digests | {case.name: provenance.case_digests(case) for case in drawn}
            self.say(provenance.declare(self.loaded, request, known, stamp))
            self.say(Phase(name=PLANNING))
            if not (request.quick or self.resume.unplanned):
                drawn = self._plan(device, options)
        digests |= {case.name: provenance.case_digests(case) for case in drawn}
        declared = provenance.declare(self.loaded, request, digests, stamp)
        self.say(declared)
        entries = real + [
            Entry(name=case.name, family=case.family, load=partial(_same, case)) for case in drawn
        ]
        return entries, bound, options, declared

    def _check_choices(self) -> None:
        spec, request = self.spec, self.request
        for dtype in request.dtypes:
            if dtype not in spec.dtypes:
                raise UsageError(
                    f"op {spec.name} does not declare dtype {dtype!r} (declared: {', '.join(spec.dtypes)})"
                )
        ranks = {len(shape) for shape in spec.shapes}
        for shape in request.shapes:
            if len(shape) not in ranks:
                declared = ", ".join(map(str, spec.shapes))
                raise UsageError(
                    f"op {spec.name} does not declare shapes like {shape} (declared: {declared})"
                )

    def _bind(self, device: str) -> Bindings:
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
            device=device,
        )

    def _plan(self, device: str, options: Options) -> list[Case]:
        spec = replace(self.spec, shapes=self.request.shapes) if self.request.shapes else self.spec
        dtypes = self.request.dtypes or None
        try:
            return plan_cases(spec, dtypes=dtypes, seed=self.request.seed, device=device, options=options)
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
            raise SpecError(
                f"KernelSpec {spec.name}: drawing inputs raised {type(error).__name__}: {error}; "
                "check `sample` and `reference`"
            ) from error

    def _judge(
        self, entries: Sequence[Entry], bound: Bindings, options: Options, declared: Declared
    ) -> Verdict:
        lost = {item.case: item for item in self.resume.lost}
        last = self.resume.last or len(entries)
        kept = [(n, entry) for n, entry in enumerate(entries, 1) if entry.name not in lost and n <= last]
        replayed: list[replay.Replayed] = []

        def done(case: Case) -> None:
            if case.family == "captured" and not options.recorded:
                found = replay.replay(self.spec, case)
                if found is not None:
                    replayed.append(found)

        found: Judgement | None = None
        if kept:
            taken = _Announced(kept, self.say, len(entries), done)
            found = judge(self.spec, taken, constants=declared.constants, options=options)
        kernels = self._kernels(bound, found, options)
        fidelity = replay.summarise(
            replayed,
            captured=len(bound.bound),
            captured_on=self.capture.manifest.device if self.capture is not None else "",
            here=device_name(),
            kernels=kernels,
            recorded=options.recorded,
        )
        return assemble.assemble(
            self.spec,
            found,
            declared=declared,
            fidelity=fidelity,
            lost=[(entry.load(), lost[entry.name]) for entry in entries if entry.name in lost],
            left_out=self._left_out(bound, beyond=len(entries) - last),
            fallback=self._fallback(kept, kernels, options),
            drawn=self._drawn(entries, found),
        )

    def _left_out(self, bound: Bindings, *, beyond: int) -> list[str]:
        told = list(bound.left_out)
        if self.resume.unplanned:
            told.append("tile edges, adversarial values and layouts: the kernel died while they were planned")
        if self.request.quick and self.request.sweep:
            told.append("tile edges, adversarial values and layouts (--quick)")
        if beyond:
            told.append(f"{beyond} cases after the kernel had crashed on {len(self.resume.lost)}")
        if self.capture is not None:
            told += [f"capture: {text}" for text in self.capture.problems]
        return told

    def _kernels(self, bound: Bindings, found: Judgement | None, options: Options) -> tuple[str, ...]:
        if options.recorded:
            assert self.capture is not None
            return sites.kernels_inside(self.capture, bound.calls)
        return found.kernels if found is not None else ()

    def _fallback(
        self, kept: Sequence[tuple[int, Entry]], kernels: tuple[str, ...], options: Options
    ) -> str | None:
        name = self.spec.name
        if kernels or not kept:
            return None
        if options.recorded:
            return f"{name}: the run launched no kernel in the captured calls: they hold no kernel's output"
        ran = fallback.eager_operators(self.spec, kept[0][1].load())
        if not ran:
            return None
        shown = ", ".join(ran[:4]) + (", ..." if len(ran) > 4 else "")
        return (
            f"{name} launched no kernel: the target ran eager operators instead ({shown}), and an eager "
            "fallback is not judged as a kernel"
        )

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


def _same(case: Case) -> Case:
    return case
