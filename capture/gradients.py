"""Gradients of one module call, observed without a change to the graph.

An identity node around the module, which is how torch's own full backward hooks find a module's input
gradient, would change the order in which gradients are added up, and with it the last bits of training.
So nothing is inserted: the nodes that the call made are found by walking back from its outputs, and the
edges on which they leave the call say which share of an input's or a parameter's gradient is this call's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec.structs import replace

from bridge.capture.record import Call, TensorRecord
from bridge.capture.recorder import Recorder

Named = Sequence[tuple[str, torch.Tensor]]
_MOST_NODES = 200_000


@dataclass(slots=True)
class _Target:
    """An input or parameter: its gradient is the sum over the edges that lead to it."""

    name: str
    edges: int = 0
    seen: int = 0
    total: torch.Tensor | None = None


@dataclass
class GradientWatch:
    """Hooks on one module call's outputs and nodes."""

    recorder: Recorder
    key: str
    store: bool
    since: int  #: autograd's count of nodes when the call began
    _handles: list[Any] = field(default_factory=list)
    _upstream: dict[str, TensorRecord] = field(default_factory=dict)
    _made: dict[str, TensorRecord] = field(default_factory=dict)
    _targets: list[_Target] = field(default_factory=list)

    def attach(self, *, outputs: Named, inputs: Named, params: Named) -> None:
        """Put the hooks on; `inputs` as they were when the call began."""
        for name, tensor in outputs:
            if tensor.requires_grad:
                register: Any = tensor.register_hook
                self._handles.append(register(self._upstream_hook(name)))
        targets: dict[tuple[int, int], _Target] = {}
        keep: list[Any] = []
        for name, tensor in (*inputs, *params):
            if not tensor.requires_grad:
                continue
            if tensor.grad_fn is None:
                targets.setdefault((id(tensor), -1), _Target(name))
            else:
                # Autograd hands out one Python object per node while one is alive: identity is by id.
                keep.append(tensor.grad_fn)
                targets.setdefault((id(tensor.grad_fn), tensor.output_nr), _Target(name))
        edges: dict[Any, list[tuple[int, _Target]]] = {}
        for node, position, target in self._leaving(
            [t.grad_fn for _, t in outputs if t.grad_fn is not None], targets
        ):
            edges.setdefault(node, []).append((position, target))
            target.edges += 1
        self._targets = [target for target in targets.values() if target.edges]
        for node, leaving in edges.items():
            self._handles.append(node.register_hook(self._node_hook(leaving)))

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def complete(self, call: Call) -> Call:
        """The call with its gradients; those that never arrived are missing."""
        for target in self._targets:
            if target.total is not None:
                self._record(target)
        return replace(
            call, grad_outputs=tuple(self._upstream.values()), grad_inputs=tuple(self._made.values())
        )

    def _leaving(
        self, roots: list[Any], targets: dict[tuple[int, int], _Target]
    ) -> list[tuple[Any, int, _Target]]:
        found: list[tuple[Any, int, _Target]] = []
        seen: set[Any] = set()
        waiting = list(roots)
        starts = {node for node, _ in targets}
        while waiting:
            node = waiting.pop()
            if node in seen or len(seen) > _MOST_NODES:
                continue
            if id(node) in starts and node._sequence_nr() < self.since:
                continue  # the module returned its input
            seen.add(node)
            for position, (after, output) in enumerate(node.next_functions):
                if after is None:
                    continue
                variable = getattr(after, "variable", None)
                place = (id(after), output) if variable is None else (id(variable), -1)
                target = targets.get(place)
                if target is not None:
                    found.append((node, position, target))
                elif variable is None and after._sequence_nr() >= self.since:
                    waiting.append(after)
        return found

    def _upstream_hook(self, name: str) -> Any:
        def hook(gradient: torch.Tensor) -> None:
            try:
                self._upstream[name] = self.recorder.observer.record(gradient, name, self.key, self.store)
            except Exception as error:
                self.recorder.problem(f"the upstream gradient of {self.key}", error)

        return hook

    def _node_hook(self, leaving: list[tuple[int, _Target]]) -> Any:
        def hook(grad_inputs: Sequence[torch.Tensor | None], _: Any) -> None:
            try:
                for position, target in leaving:
                    self._add(target, grad_inputs[position])
            except Exception as error:
                self.recorder.problem(f"a gradient made by {self.key}", error)

        return hook

    def _add(self, target: _Target, share: torch.Tensor | None) -> None:
        target.seen += 1
        if share is not None:
            if target.total is None:
                target.total = share
            else:
                self.recorder.muted += 1
                try:
                    with torch.no_grad():
                        target.total = target.total + share
                finally:
                    self.recorder.muted -= 1
        if target.seen == target.edges and target.total is not None:
            self._record(target)

    def _record(self, target: _Target) -> None:
        assert target.total is not None
        self._made[target.name] = self.recorder.observer.record(
            target.total, target.name, self.key, self.store
        )
        target.total = None
