"""Where in the step a call happens, and which forward call a backward one belongs to.

Autograd numbers its nodes as it makes them. The node that a forward operator has just made is the last
one numbered, so a table from number to call finds, in the backward pass, the operator, module and
source line that the running node came from. Anomaly mode, which would do the same, costs far more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bridge.capture.record import Phase

#: AccumulateGrad nodes all bear this number.
_NO_SEQUENCE = (1 << 64) - 1


#: The autograd node that is running on this thread, or None.
current_node: Callable[[], Any] = torch._C._current_autograd_node

_nodes_made: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


@dataclass(slots=True)
class Origin:
    """The forward operator that made an autograd node."""

    call: int | None
    module: str
    module_class: str
    source: str | None


@dataclass(slots=True)
class Frame:
    """A module call that has not returned."""

    module: Any
    fqn: str
    module_class: str
    call: int
    in_backward: bool


class Stage:
    """Tracks the phases of one step."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.in_optimizer = False
        self.microbatch = 0
        self._forwards = 0
        self._stage = "before"
        # The newest node was made before the step, by nobody that we know.
        self._origins: dict[int, Origin | None] = {_nodes_made() - 1: None}

    def now(self) -> tuple[Phase, Any]:
        """The phase, and the autograd node that is running, if one is."""
        node = current_node()
        if node is not None:
            if self._recomputing():
                return "recompute", node
            self._stage = "after"
            return "backward", node
        if self.in_optimizer:
            return "optimizer", None
        if self.frames or self._stage == "forward":
            return "forward", None
        return "other", None

    def enter(self, frame: Frame) -> None:
        """A module call begins."""
        if not self.frames and not frame.in_backward and self._stage != "forward":
            self.microbatch = self._forwards
            self._forwards += 1
            self._stage = "forward"
        self.frames.append(frame)

    def leave(self, module: Any) -> Frame | None:
        """The innermost call of this module has ended, and with it those inside that never returned."""
        for position in range(len(self.frames) - 1, -1, -1):
            if self.frames[position].module is module:
                frame = self.frames[position]
                del self.frames[position:]
                return frame
        return None

    def note_origin(self, call: int | None, source: str | None) -> None:
        """Remember that the operator dispatched now made the newest autograd node, if it did."""
        number = _nodes_made() - 1
        if number not in self._origins:
            self._note(number, call, source)

    def note_view(self, source: Callable[[], str | None]) -> None:
        """`note_origin` for an operator that makes no call; its line is asked for only if it made a node."""
        if current_node() is None:
            number = _nodes_made() - 1
            if number not in self._origins:
                self._note(number, None, source())

    def _note(self, number: int, call: int | None, source: str | None) -> None:
        top = self.frames[-1] if self.frames else None
        self._origins[number] = Origin(call, top.fqn if top else "", top.module_class if top else "", source)

    def origin(self, node: Any) -> Origin | None:
        """The forward operator that made a node."""
        number = node._sequence_nr()
        return None if number == _NO_SEQUENCE else self._origins.get(number)

    def _recomputing(self) -> bool:
        if self.frames and self.frames[-1].in_backward:
            return True
        if not torch.is_grad_enabled():
            return False
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return hooks is not None and "_recomputation_hook" in getattr(hooks[0], "__qualname__", "")
