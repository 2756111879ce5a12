"""Raw Triton launches, which no dispatch mode sees: wrap the methods that every launch goes through."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from msgspec.structs import replace

from bridge.capture.encode import plain
from bridge.capture.record import Call, TensorRecord
from bridge.capture.recorder import Recorder


class LaunchHooks:
    """Wraps `run` of Triton's launchers, from `install` to `remove`; without Triton there are none."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._wrapped: list[tuple[Any, Any]] = []

    def install(self) -> None:
        """Begin to watch. Triton is not imported: a run that uses it has done so."""
        for module, names in (
            ("triton.runtime.jit", ("JITFunction",)),
            ("triton.runtime.interpreter", ("InterpretedFunction",)),
            ("triton.runtime.autotuner", ("Autotuner", "Heuristics")),
        ):
            for name in names:
                kind = getattr(sys.modules.get(module), name, None)
                if kind is not None and "run" in vars(kind):
                    self._wrapped.append((kind, vars(kind)["run"]))
                    kind.run = self._around(vars(kind)["run"])

    def remove(self) -> None:
        """Put the original methods back."""
        for kind, original in self._wrapped:
            kind.run = original
        self._wrapped = []

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self._recorder

        @functools.wraps(original)
        def run(launcher: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> Any:
            # Muted: the outermost launcher was recorded; what it does inside (trials of an autotuner, an
            # interpreter's own operators) is no launch of the user's.
            if recorder.muted or warmup or _is_ours(launcher):
                return original(launcher, *args, grid=grid, warmup=warmup, **kwargs)
            launch = _Launch(recorder)
            try:
                launch.begin(launcher, args, kwargs)
            except Exception as error:
                recorder.problem("recording a Triton launch", error)
            recorder.muted += 1
            try:
                result = original(launcher, *args, grid=grid, warmup=warmup, **kwargs)
            finally:
                recorder.muted -= 1
            try:
                launch.end(launcher, grid)
            except Exception as error:
                recorder.problem("recording a Triton launch", error)
            return result

        return run


class _Launch:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._given: list[tuple[str, torch.Tensor]] = []
        self._inputs: list[TensorRecord] = []
        self._values: dict[str, Any] = {}
        self._call: Call | None = None

    def begin(self, launcher: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kernel = innermost(launcher)
        name = str(getattr(kernel, "__name__", None) or getattr(kernel.fn, "__name__", "kernel"))
        self.begin_named(name, {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs})

    def begin_named(self, name: str, values: dict[str, Any]) -> None:
        """A kernel begins, its arguments by name."""
        recorder, observer = self._recorder, self._recorder.observer
        self._values = values
        phase, node = recorder.stage.now()
        module, module_class, forward, source, _ = recorder.place(phase, node)
        index = recorder.next_index()
        if node is None:
            recorder.stage.note_origin(index, source)
        key = recorder.op_key(module, "launch", name)
        selected = recorder.matcher.matches((name,), key, phase)
        self._store = selected and recorder.matcher.outputs
        attrs = {}
        for argument, value in self._values.items():
            if isinstance(value, torch.Tensor):
                self._given.append((argument, value))
                store = selected and recorder.matcher.inputs
                self._inputs.append(observer.record(value, argument, key, store))
            elif value is not None and argument != "stream":
                attrs[argument] = plain(value)
        self._call = Call(
            index=index,
            key=key,
            kind="launch",
            op=name,
            step=recorder.step,
            rank=recorder.rank,
            phase=phase,
            microbatch=recorder.stage.microbatch,
            module=module,
            module_class=module_class,
            inputs=tuple(self._inputs),
            attrs=attrs,
            parent=recorder.parents[-1] if recorder.parents else None,
            forward=forward,
            source=source,
            replayable=False,
        )

    def end(self, launcher: Any, grid: Any) -> None:
        flags: dict[str, Any] = {"grid": _grid(grid, {**self._values})}
        config = getattr(launcher, "best_config", None)
        if config is not None:
            flags["config"] = str(config)
        self.end_named(flags)

    def end_named(self, flags: dict[str, Any]) -> None:
        """A kernel has been launched."""
        if self._call is None:
            return
        recorder, observer = self._recorder, self._recorder.observer
        call = self._call
        outputs, mutated = [], []
        for name, tensor in self._given:
            # Nothing says which arguments a kernel writes: where bytes are at hand they are compared, and
            # elsewhere the reader compares the digests. Inductor names what it only reads.
            if name.startswith("in_ptr"):
                continue
            if observer.unchanged(tensor):
                continue
            observer.written(tensor, call.index)
            outputs.append(observer.record(tensor, name, call.key, self._store))
            mutated.append(name)
        recorder.emit(replace(call, outputs=tuple(outputs), mutated=tuple(mutated), flags=flags))


class InductorLaunch:
    """What torch's compiled code gets for a kernel it is about to launch; it calls `finalize` afterwards."""

    def __init__(self, recorder: Recorder, name: str, values: dict[str, Any]) -> None:
        self._recorder = recorder
        self._launch = _Launch(recorder)
        try:
            self._launch.begin_named(name, values)
        except Exception as error:
            recorder.problem(f"recording the launch of {name}", error)

    def finalize(self, _: Any) -> None:
        """The kernel has been launched."""
        try:
            self._launch.end_named({"compiled": True})
        except Exception as error:
            self._recorder.problem("recording a launch", error)


def _is_ours(launcher: Any) -> bool:
    return getattr(getattr(launcher, "fn", None), "__module__", "") == "bridge.capture.digest_cuda"


def innermost(launcher: Any) -> Any:
    """The kernel inside the autotuners and heuristics around it."""
    while not hasattr(launcher, "arg_names") or hasattr(getattr(launcher, "fn", None), "run"):
        launcher = launcher.fn
    return launcher


def _grid(grid: Any, values: dict[str, Any]) -> Any:
    if callable(grid):
        try:
            grid = grid(values)
        except Exception:  # a grid that needs the compiler's own bound arguments
            return "callable"
    return plain(grid if isinstance(grid, (tuple, list)) else (grid,))
