"""Which calls' tensors are stored. Every call is digested; storing is what costs disk."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from bridge.capture.record import Phase
from bridge.errors import UsageError

Which = Literal["all", "inputs", "outputs", "none"]


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """What to store.

    A pattern is a shell glob. It is compared with a call's key ("layers.0.attention.wq/op_0_mm"), its
    operator ("aten::mm.default", "aten::mm", "mm"), its Triton kernel's name and, for module calls, the
    module's FQN and class.
    """

    patterns: tuple[str, ...] = ()
    which: Which = (
        "all"  #: of a selected call: its inputs (params and upstream gradients with them), its outputs
    )
    phases: tuple[Phase, ...] = ()  #: () is every phase
    ranks: tuple[int, ...] = ()  #: () is every rank
    max_tensor_bytes: int | None = None  #: larger tensors are digested only, and listed as dropped

    def check(self) -> None:
        """Refuse what could never select anything.

        Raises:
            UsageError: an unknown phase or choice, an empty pattern, a size that is not positive.
        """
        phases = ("forward", "recompute", "backward", "optimizer", "other")
        for phase in self.phases:
            if phase not in phases:
                raise UsageError(f"a phase must be one of {', '.join(phases)}; got {phase!r}")
        if self.which not in ("all", "inputs", "outputs", "none"):
            raise UsageError(f"tensors must be all, inputs, outputs or none; got {self.which!r}")
        if any(not pattern for pattern in self.patterns):
            raise UsageError("a pattern must not be empty; '*' selects every call")
        if self.max_tensor_bytes is not None and self.max_tensor_bytes <= 0:
            raise UsageError(
                f"the largest tensor to store must be positive; got {self.max_tensor_bytes} bytes"
            )


class Matcher:
    """A selection made fast: names are matched once, keys only where a pattern could name one."""

    def __init__(self, selection: Selection, *, rank: int) -> None:
        wanted = selection.which != "none" and (not selection.ranks or rank in selection.ranks)
        self._patterns = selection.patterns if wanted else ()
        self._phases = frozenset(selection.phases)
        self._names = _union(self._patterns)
        self._keys = _union([p for p in self._patterns if "/" in p or "#" in p])
        self._seen: dict[tuple[Any, ...], bool] = {}
        self.inputs = selection.which in ("all", "inputs")
        self.outputs = selection.which in ("all", "outputs")
        self.everything = "*" in self._patterns and not self._phases

    def matches(self, names: tuple[str, ...], key: str, phase: str) -> bool:
        """True when a call with these names, key and phase is selected."""
        if self._names is None or (self._phases and phase not in self._phases):
            return False
        found = self._seen.get(names)
        if found is None:
            found = self._seen[names] = any(self._names.match(name) for name in names if name)
        return found or (self._keys is not None and self._keys.match(key) is not None)


def _union(patterns: Sequence[str]) -> re.Pattern[str] | None:
    if not patterns:
        return None
    return re.compile("|".join(f"(?:{fnmatch.translate(pattern)})" for pattern in patterns))
