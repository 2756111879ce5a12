"""Which kernels a call really ran: Triton launches with their constexprs, and custom ops.

A wrapper around `JITFunction.run` and `InterpretedFunction.run` is put in place for the duration of
`watch()` only. Tile sizes for edge shapes come from the constexprs seen here, never from a guess, and
a target that launched nothing is not judged as a kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

#: Op namespaces that belong to torch itself; any other one is somebody's custom op.
_TORCH_NAMESPACES = frozenset(
    {"aten", "prim", "prims", "profiler", "inductor", "debugprims", "_c10d_functional", "c10d"}
)


@dataclass(slots=True)
class Seen:
    """What was run inside one `watch()`: kernel names in first-seen order, and integer constexprs."""

    kernels: list[str] = field(default_factory=list)
    constexprs: dict[str, set[int]] = field(default_factory=dict)  #: "kernel.NAME" -> values
    launches: int = 0
    tuners: list[Any] = field(default_factory=list)  #: Triton autotuners with more than one configuration

    def tiles(self) -> tuple[int, ...]:
        """Sizes that look like tile extents: integer constexprs of at least 2, ascending."""
        return tuple(sorted({v for values in self.constexprs.values() for v in values if v >= 2}))

    def add(self, kernel: str) -> None:
        self.launches += 1
        if kernel not in self.kernels:
            self.kernels.append(kernel)


class _CustomOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, seen: Seen) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace = func.name().split("::")[0]
        if namespace not in _TORCH_NAMESPACES:
            self._seen.add(func.name())
        return func(*args, **(kwargs or {}))


@contextmanager
def watch() -> Iterator[Seen]:
    """Record launches and custom ops of the block; nests, and restores what it wrapped."""
    seen = Seen()
    undo: list[tuple[type, Callable[..., Any]]] = []
    for cls in _launchers():
        undo.append((cls, cls.run))
        wrap = _tuned if cls.__name__ == "Autotuner" else _wrapped
        cls.run = wrap(cls.run, seen)
    try:
        with _CustomOps(seen):
            yield seen
    finally:
        for cls, run in reversed(undo):
            setattr(cls, "run", run)  # noqa: B010 - mypy knows no `run` on a plain type


def _launchers() -> list[Any]:
    # Nobody can have defined a kernel while triton was never imported, so it is not imported here.
    if "triton" not in sys.modules:
        return []
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    return [JITFunction, InterpretedFunction, Autotuner]


def _wrapped(run: Callable[..., Any], seen: Seen) -> Callable[..., Any]:
    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("warmup"):
            _note(self, args, kwargs, seen)
        return run(self, *args, **kwargs)

    return recorded


def _tuned(run: Callable[..., Any], seen: Seen) -> Callable[..., Any]:
    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(self.configs) < 2:
            return run(self, *args, **kwargs)
        if not any(known is self for known in seen.tuners):
            seen.tuners.append(self)
        from triton import knobs

        if not knobs.runtime.interpret:
            return run(self, *args, **kwargs)
        # The interpreter has no clock to tune by and raises; the first configuration is as good as any.
        configs = self.configs
        self.configs = configs[:1]
        try:
            return run(self, *args, **kwargs)
        finally:
            self.configs = configs

    return recorded


def _note(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], seen: Seen) -> None:
    name = getattr(kernel.fn, "__name__", "kernel")
    seen.add(name)
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    for arg, annotation in getattr(kernel.fn, "__annotations__", {}).items():
        if "constexpr" not in str(annotation):
            continue
        value = values.get(arg)
        if isinstance(value, int) and not isinstance(value, bool):
            seen.constexprs.setdefault(f"{name}.{arg}", set()).add(value)
