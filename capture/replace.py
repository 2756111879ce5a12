"""Put a kernel in a module class's place for one run: `replace = {"torch.nn.RMSNorm" = "rms_norm"}`.

For runs that have no override mechanism of their own (torchtitan 0.2.x, plain scripts). The class's
`forward` calls the kernel while the run lasts and is what it was afterwards. A kernel's inputs are
the call's arguments, then the module's parameters of those names; its attributes are the module's.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from bridge.errors import ConfigError, RunError

if TYPE_CHECKING:
    from bridge.verify.spec import KernelSpec


@contextmanager
def replaced(classes: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Run with kernels in place; yields class -> kernel for the manifest.

    Args:
        classes: Dotted module class -> kernel, by name or as FILE[:SPEC].

    Raises:
        ConfigError: No such class, or no module class.
        UsageError, SpecError: No such kernel.
    """
    from bridge.verify.registry import load_spec

    originals: list[tuple[Any, bool, Any]] = []
    try:
        for path, kernel in classes.items():
            owner = _module_class(path)
            originals.append((owner, "forward" in vars(owner), owner.forward))
            owner.forward = _forward(load_spec(kernel).spec, path)
        yield dict(classes)
    finally:
        for owner, had_own, forward in reversed(originals):
            if had_own:
                owner.forward = forward
            else:
                del owner.forward


def _module_class(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"[capture] replace names {path!r}, which cannot be imported: {error}") from None
    if not (isinstance(found, type) and issubclass(found, torch.nn.Module)):
        raise ConfigError(f"[capture] replace names {path!r}, which is no torch.nn.Module class")
    return found


def _forward(spec: KernelSpec, path: str) -> Any:
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(spec.inputs, args, strict=False)) | kwargs
        if len(args) > len(spec.inputs) or not given.keys() <= set(spec.inputs):
            raise RunError(
                f"kernel {spec.name} takes {', '.join(spec.inputs)}, but {path} was called with "
                f"{len(args)} arguments and {sorted(kwargs)}; it cannot replace this class"
            )
        inputs = [given[name] if name in given else _own(self, name, spec, path) for name in spec.inputs]
        unread = sorted(_state(self) - set(spec.inputs))
        if unread:
            raise RunError(
                f"kernel {spec.name} does not read {', '.join(unread)}, which this {path} has; "
                "it cannot replace it"
            )
        attrs = {name: _attribute(self, name, spec, path, inputs[0]) for name in spec.attrs}
        return spec.target(*inputs, **attrs)

    return forward


def _own(module: torch.nn.Module, name: str, spec: KernelSpec, path: str) -> torch.Tensor:
    found = getattr(module, name, None)
    if not isinstance(found, torch.Tensor):
        raise RunError(
            f"kernel {spec.name} needs {name!r}, which this {path} does not have; it cannot replace it"
        )
    return found


def _state(module: torch.nn.Module) -> set[str]:
    """Names of the parameters and buffers that the module itself saves."""
    buffers = {name for name in module._buffers if name not in module._non_persistent_buffers_set}
    held = module._parameters | module._buffers
    return {name for name in module._parameters.keys() | buffers if held[name] is not None}


def _attribute(module: torch.nn.Module, name: str, spec: KernelSpec, path: str, first: torch.Tensor) -> Any:
    value = getattr(module, name, spec.attrs[name])
    if value is None and name == "eps":
        # torch's norms take the smallest step of the input's type when no eps was given.
        return torch.finfo(first.dtype).eps
    if value is None and spec.attrs[name] is not None:
        raise RunError(
            f"kernel {spec.name} needs {name!r}, which this {path} leaves open; it cannot replace it"
        )
    return value
