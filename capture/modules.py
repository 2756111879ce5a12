"""Module calls: what a module was given and returned, the parameters it used, and its gradients.

Hooks are put on each module of the model for the length of one step. They come after the hooks that are
there already, so that FSDP has gathered the parameters and cast the inputs when ours look.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bridge.capture.encode import plain, split_arguments, visit_tensors
from bridge.capture.gradients import GradientWatch
from bridge.capture.phase import Frame, current_node
from bridge.capture.record import Call, TensorRecord
from bridge.capture.recorder import Recorder

#: Wrappers that stand in for the module they hold; they have no name of their own.
_WRAPPERS = ("CheckpointWrapper", "OptimizedModule")
_WRAPPER_NAMES = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


class ModuleHooks:
    """Hooks on all modules of a model, from `install` to `remove`."""

    def __init__(self, recorder: Recorder, parts: list[nn.Module]) -> None:
        self._recorder = recorder
        self._names = module_names(parts)
        self._handles: list[Any] = []
        self._begun: dict[int, _Begun] = {}
        self._watched: list[tuple[Call, GradientWatch]] = []
        for part in parts:
            for name, module in part.named_modules():
                fqn = self._names.get(module, clean_name(name))
                for _, parameter in module.named_parameters(recurse=False):
                    recorder.owners.setdefault(id(parameter), (fqn, class_name(module)))

    def install(self) -> None:
        """Begin to watch."""
        for module in self._names:
            self._handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            self._handles.append(
                module.register_forward_hook(self._after, with_kwargs=True, always_call=True)
            )

    def remove(self) -> None:
        """Take every hook off again, and hand out the module calls whose gradients are known now."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for call, watch in self._watched:
            watch.remove()
            try:
                self._recorder.emit(watch.complete(call))
            except Exception as error:
                self._recorder.problem(f"gradients of {call.key}", error)
        self._watched = []

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or self._recorder.muted:
            return
        try:
            self._begin(module, args, kwargs)
        except Exception as error:
            self._recorder.problem(f"recording the inputs of module {self._names.get(module)}", error)

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling() or self._recorder.muted:
            return
        try:
            self._end(module, output)
        except Exception as error:
            self._recorder.problem(f"recording the outputs of module {self._names.get(module)}", error)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder = self._recorder
        fqn, kind = self._names[module], class_name(module)
        in_backward = current_node() is not None
        index = recorder.next_index()
        recorder.stage.enter(Frame(module, fqn, kind, index, in_backward))
        phase, _ = recorder.stage.now()
        key = recorder.module_key(fqn)
        parent = recorder.parents[-1] if recorder.parents else None
        recorder.parents.append(index)
        selected = recorder.matcher.matches((fqn, kind), key, phase)
        store = selected and recorder.matcher.inputs
        begun = _Begun(index, key, phase, parent, selected, torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self._begun[index] = begun
        observer = recorder.observer

        def visit_input(path: str, tensor: torch.Tensor) -> None:
            begun.inputs.append(observer.record(tensor, path, key, store))
            begun.given.append((path, tensor))

        begun.attrs = {**plain_attributes(module), **split_arguments((), args, kwargs, visit_input)}
        for name, tensor in own_tensors(module, recurse=selected):
            begun.params.append(observer.record(tensor, name, key, store))
            begun.used.append((name, tensor))

    def _end(self, module: nn.Module, output: Any) -> None:
        recorder = self._recorder
        frame = recorder.stage.leave(module)
        if frame is None:
            return
        begun = self._begun.pop(frame.call, None)
        recorder.leave_parent(frame.call)
        if begun is None:
            return
        store = begun.selected and recorder.matcher.outputs
        outputs: list[TensorRecord] = []
        made: list[tuple[str, torch.Tensor]] = []

        def visit_output(path: str, tensor: torch.Tensor) -> None:
            outputs.append(recorder.observer.record(tensor, path, begun.key, store))
            made.append((path, tensor))

        visit_tensors(output, visit_output)
        call = Call(
            index=begun.index,
            key=begun.key,
            kind="module",
            op=frame.module_class,
            step=recorder.step,
            rank=recorder.rank,
            phase=begun.phase,
            microbatch=recorder.stage.microbatch,
            module=frame.fqn,
            module_class=frame.module_class,
            inputs=tuple(begun.inputs),
            outputs=tuple(outputs),
            params=tuple(begun.params),
            attrs=begun.attrs,
            parent=begun.parent,
            flags=autocast_flags(),
            note=None if output is not None else "returned nothing, or raised",
        )
        recorder.emit(call)
        if begun.selected and begun.phase == "forward" and any(tensor.requires_grad for _, tensor in made):
            watch = GradientWatch(recorder, begun.key, recorder.matcher.inputs, since=begun.sequence)
            self._watched.append((call, watch))
            watch.attach(outputs=made, inputs=begun.given, params=begun.used)


class _Begun:
    """A module call that has not returned."""

    __slots__ = (
        "attrs",
        "given",
        "index",
        "inputs",
        "key",
        "params",
        "parent",
        "phase",
        "selected",
        "sequence",
        "used",
    )

    def __init__(
        self, index: int, key: str, phase: Any, parent: int | None, selected: bool, sequence: int
    ) -> None:
        self.index = index
        self.key = key
        self.phase = phase
        self.parent = parent
        self.selected = selected
        self.sequence = sequence
        self.inputs: list[TensorRecord] = []
        self.params: list[TensorRecord] = []
        self.given: list[tuple[str, torch.Tensor]] = []
        self.used: list[tuple[str, torch.Tensor]] = []
        self.attrs: dict[str, Any] = {}


def module_names(parts: list[nn.Module]) -> dict[nn.Module, str]:
    """FQN of every module, wrappers left out; the parts of a pipeline share one space of names."""
    names: dict[nn.Module, str] = {}
    for part in parts:
        for name, module in part.named_modules():
            if type(module).__name__ not in _WRAPPERS and not isinstance(module, torch.jit.ScriptModule):
                names.setdefault(module, clean_name(name))
    return names


def clean_name(fqn: str) -> str:
    """A module's FQN as the model's author knows it, without the names that wrappers put in between."""
    fqn += "."
    for wrapper in _WRAPPER_NAMES:
        fqn = fqn.replace(wrapper, "")
    return fqn.rstrip(".")


def class_name(module: nn.Module) -> str:
    """Class of a module; `fully_shard` replaces it by a subclass FSDPX of X."""
    kind = type(module)
    if (
        kind.__name__.startswith("FSDP")
        and len(kind.__mro__) > 2
        and kind.__mro__[1].__name__ == "FSDPModule"
    ):
        return kind.__mro__[2].__name__
    return kind.__name__


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Numbers, strings and flags that a module carries ("eps"), and tuples of them."""
    return {
        name: plain(value)
        for name, value in vars(module).items()
        if name[:1] != "_" and name != "training" and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return 0 < len(value) <= 16 and all(isinstance(item, (bool, int, float, str)) for item in value)
    return isinstance(value, (bool, int, float, str))


def own_tensors(module: nn.Module, *, recurse: bool) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers by local name."""
    if not recurse:
        # What `named_parameters` does, with a fraction of the work.
        mine: dict[int, tuple[str, torch.Tensor]] = {}
        for name, own in (*module._parameters.items(), *module._buffers.items()):
            if own is not None:
                mine.setdefault(id(own), (name, own))
        return list(mine.values())
    found: list[tuple[str, torch.Tensor]] = []
    for name, tensor in module.named_parameters(recurse=recurse):
        found.append((clean_name(name), tensor))
    for name, buffer in module.named_buffers(recurse=recurse):
        found.append((clean_name(name), buffer))
    return found


def autocast_flags() -> dict[str, Any]:
    """{"autocast": {"cpu": "bfloat16"}} where autocast is on."""
    active = {}
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            active[device] = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    return {"autocast": active} if active else {}
