"""Record one step: every operator call that the dispatch mode sees, and what modules and launches add."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import torch

from bridge.capture.contents import Contents
from bridge.capture.encode import plain, split_arguments, visit_tensors
from bridge.capture.observe import IGNORED, LATER, PART, VALUES, Observer, State
from bridge.capture.phase import Stage
from bridge.capture.randomness import random_flags
from bridge.capture.record import Call, Phase, TensorRecord
from bridge.capture.schema import OpInfo, op_info
from bridge.capture.select import Matcher
from bridge.capture.source import call_site, source_line
from bridge.capture.writer import RankWriter

log = logging.getLogger("bridge.capture")
_BATCH = 256
#: Seconds after which records go to disk however few they are: a killed process leaves what is there.
_LONGEST_WAIT = 0.25


@dataclass(slots=True)
class Pending:
    """A call that has begun."""

    info: OpInfo
    index: int
    key: str
    phase: Phase
    module: str
    module_class: str
    forward: int | None
    source: str | None
    parent: int | None
    store_outputs: bool
    inputs: list[TensorRecord]
    written: list[tuple[str, torch.Tensor]]
    attrs: dict[str, Any]
    flags: dict[str, Any]


class Recorder:
    """The state of one captured step on one rank."""

    def __init__(
        self, writer: RankWriter, matcher: Matcher, contents: Contents, *, step: int, rank: int
    ) -> None:
        self.step = step
        self.rank = rank
        self.stage = Stage()
        self.observer = Observer(contents)
        self.matcher = matcher
        self.muted = 0  #: > 0: what is dispatched is the tool's or an interpreter's own work
        self.parents: list[int] = []
        self.owners: dict[int, tuple[str, str]] = {}  #: id of a parameter -> FQN and class of its module
        self._writer = writer
        self._contents = contents
        self._next = 0
        self._counters: dict[str, int] = {}
        self._keys: dict[str, int] = {}
        self._batch: list[Call] = []
        self._flush_by = time.monotonic() + _LONGEST_WAIT
        self.emitted: set[int] = set()  #: indices of calls that were written, once or again

    def problem(self, what: str, error: BaseException) -> None:
        """Note that something went wrong in the tool; training goes on."""
        text = f"{what}: {type(error).__name__}: {error}"
        if text not in self._writer.problems:
            self._writer.problems.append(text)
            log.warning("capture: %s; training goes on, the capture is partial", text, exc_info=error)

    def passed(self, info: OpInfo, result: Any) -> None:
        """An operator that makes no call has run on plain tensors."""
        if info.allocates:
            visit_tensors(result, lambda _, tensor: self.observer.allocated(tensor))
            return
        self.stage.note_view(_nowhere if info.reshapes else source_line)

    def begin(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pending | None:
        """Record the inputs of an operator that is about to run; None when it makes no call."""
        info = op_info(func)
        if info.allocates:
            return ALLOCATION
        if info.silent:
            self.stage.note_view(source_line)
            return None
        return self._begin(info, args, kwargs)

    def _begin(self, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pending:
        phase, node = self.stage.now()
        module, module_class, forward, source, compiled = self.place(phase, node)
        self.observer.storages.compiled = compiled
        index = self.next_index()
        if node is None:
            self.stage.note_origin(index, source)
        key = self.op_key(module, "op", info.short)
        selected = self.matcher.matches(info.names, key, phase)
        store = selected and self.matcher.inputs
        observer = self.observer
        record = observer.record
        state: State = LATER if info.waits else VALUES
        inputs: list[TensorRecord] = []
        written: list[tuple[str, torch.Tensor]] = []
        if info.writes or info.opaque:
            delivery = info.base == "aten::copy_" and len(args) > 1 and observer.delivers(args[0], args[1])

            def visit(path: str, tensor: torch.Tensor) -> None:
                argument = _argument(info, path)
                filled = argument in info.fills or (delivery and path == "0")
                inputs.append(record(tensor, path, key, store, IGNORED if filled else state))
                if argument in info.writes:
                    written.append((path, tensor))
                if info.opaque:
                    given.append(tensor)

            given: list[torch.Tensor] = []
            attrs = split_arguments(info.arguments, args, kwargs, visit)
            for tensor in given:
                # Unseen kernels may write next: what they were given is looked at again later.
                observer.distrust(tensor)
        else:

            def visit(path: str, tensor: torch.Tensor) -> None:
                inputs.append(record(tensor, path, key, store, state))

            attrs = split_arguments(info.arguments, args, kwargs, visit)
        flags: dict[str, Any] = {}
        if info.random:
            flags.update(random_flags(args, kwargs, keep=store))
        if compiled:
            flags["compiled"] = True
        return Pending(
            info=info,
            index=index,
            key=key,
            phase=phase,
            module=module,
            module_class=module_class,
            forward=forward,
            source=source,
            parent=self.parents[-1] if self.parents else None,
            store_outputs=selected and self.matcher.outputs,
            inputs=inputs,
            written=written,
            attrs=attrs,
            flags=flags,
        )

    def end(self, pending: Pending, result: Any) -> None:
        """Record the outputs of an operator that has run."""
        if pending is ALLOCATION:
            visit_tensors(result, lambda _, tensor: self.observer.allocated(tensor))
            return
        info, observer, index = pending.info, self.observer, pending.index
        for _, tensor in pending.written:
            observer.written(tensor, index, partly=info.partial)
        outputs: list[TensorRecord] = []
        state: State = LATER if info.deferred else VALUES
        key, store = pending.key, pending.store_outputs
        if type(result) is torch.Tensor and not (info.deferred or info.partial):
            outputs.append(observer.record(result, "0", key, store, state, index))
            returned = {id(result)}
        else:
            returned = self._record_results(pending, result, outputs, state)
        for path, tensor in pending.written:
            # Fused optimizers return nothing, collectives a handle: what they wrote is their output.
            if id(tensor) not in returned:
                outputs.append(observer.record(tensor, path, key, store, state))
        self.emit(
            Call(
                index=index,
                key=key,
                kind="op",
                op=info.name,
                step=self.step,
                rank=self.rank,
                phase=pending.phase,
                microbatch=self.stage.microbatch,
                module=pending.module,
                module_class=pending.module_class,
                inputs=tuple(pending.inputs),
                outputs=tuple(outputs),
                mutated=tuple([path for path, _ in pending.written]),
                attrs=pending.attrs,
                parent=pending.parent,
                forward=pending.forward,
                source=pending.source,
                flags=pending.flags,
                replayable=info.replayable,
            )
        )

    def _record_results(
        self, pending: Pending, result: Any, outputs: list[TensorRecord], state: State
    ) -> set[int]:
        """Record whatever an operator returned; the ids of its tensors."""
        info, observer = pending.info, self.observer
        key, store, returned = pending.key, pending.store_outputs, set()
        if info.deferred:
            visit_tensors(result, lambda _, tensor: observer.due(tensor))
            for _, tensor in pending.written:
                observer.due(tensor)

        def visit(path: str, tensor: torch.Tensor) -> None:
            returned.add(id(tensor))
            part = info.partial and path == "0"
            outputs.append(observer.record(tensor, path, key, store, PART if part else state, pending.index))

        visit_tensors(result, visit)
        if isinstance(result, (bool, int, float)):
            pending.flags["returned"] = plain(result)
        return returned

    def failed(self, pending: Pending, error: BaseException) -> None:
        """Record an operator that raised; its outputs do not exist."""
        if pending is ALLOCATION:
            return
        self.emit(
            Call(
                index=pending.index,
                key=pending.key,
                kind="op",
                op=pending.info.name,
                step=self.step,
                rank=self.rank,
                phase=pending.phase,
                microbatch=self.stage.microbatch,
                module=pending.module,
                module_class=pending.module_class,
                inputs=tuple(pending.inputs),
                attrs=pending.attrs,
                parent=pending.parent,
                source=pending.source,
                replayable=False,
                note=f"raised {type(error).__name__}",
            )
        )

    def leave_parent(self, index: int) -> None:
        """A call that others ran inside has ended, and those inside that never ended with it."""
        if index in self.parents:
            del self.parents[self.parents.index(index) :]

    def next_index(self) -> int:
        """The next number in execution order."""
        index = self._next
        self._next += 1
        return index

    def op_key(self, module: str, kind: str, name: str) -> str:
        """A fresh key "module/op_N_name"; N counts the module's calls of every phase."""
        place = module or "<none>"
        count = self._counters.get(place, 0)
        self._counters[place] = count + 1
        return f"{place}/{kind}_{count}_{name}"

    def module_key(self, fqn: str) -> str:
        """A fresh key of a module call: its FQN, "#1" and so on from the second call."""
        place = fqn or "<root>"
        count = self._keys.get(place, 0)
        self._keys[place] = count + 1
        return f"{place}#{count}" if count else place

    def emit(self, call: Call) -> None:
        """Hand a call to the writer, in batches."""
        self._batch.append(call)
        self.emitted.add(call.index)
        if len(self._batch) >= _BATCH or time.monotonic() > self._flush_by:
            self.flush()

    def flush(self) -> None:
        """Hand everything known so far to the writer."""
        self._flush_by = time.monotonic() + _LONGEST_WAIT
        if self._batch:
            self._writer.put_calls(self._batch)
            self._batch = []
        lines = self._contents.lines()
        if lines:
            self._writer.put_contents(lines)

    def finish(self) -> None:
        """The step is over: collect the digests that a device still holds."""
        lines = self._contents.collect()
        if lines:
            self._writer.put_contents(lines)
        self.flush()

    @property
    def seen(self) -> int:
        """How many calls have begun."""
        return self._next

    def place(self, phase: Phase, node: Any) -> tuple[str, str, int | None, str | None, bool]:
        """Module, its class, forward call and source line of what is dispatched now, and if compiled."""
        if node is not None and phase == "backward":
            return *self._backward_place(node), type(node).__name__ == "CompiledFunctionBackward"
        source, compiled = call_site()
        if self.stage.frames:
            top = self.stage.frames[-1]
            return top.fqn, top.module_class, None, source, compiled
        return "", "", None, source, compiled

    def _backward_place(self, node: Any) -> tuple[str, str, int | None, str | None]:
        origin = self.stage.origin(node)
        if origin is not None:
            return origin.module, origin.module_class, origin.call, origin.source
        variable = getattr(node, "variable", None)
        if variable is not None:
            fqn, module_class = self.owners.get(id(variable), ("", ""))
            return fqn, module_class, None, None
        return "", "", None, None


#: Stands for an operator that makes no call, but whose results must be known as allocated.
ALLOCATION = Pending(
    info=OpInfo(name="", base="", short="", names=(), silent=True, allocates=True),
    index=-1,
    key="",
    phase="other",
    module="",
    module_class="",
    forward=None,
    source=None,
    parent=None,
    store_outputs=False,
    inputs=[],
    written=[],
    attrs={},
    flags={},
)


def _nowhere() -> None:
    """The line of a view: not worth a walk up the stack."""


def _argument(info: OpInfo, path: str) -> str:
    head = path.split(".", 1)[0]
    if head.isdigit() and int(head) < len(info.arguments):
        return info.arguments[int(head)]
    return head
