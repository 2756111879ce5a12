"""Judge a torchtitan override without a spec.

    bridge verify --op torchtitan.overrides.fused_swiglu.fused_swiglu --from capture/

The reference is the module class that the override targets, golden is that in FP64, the inputs are the
captured calls. An override keeps the checkpoint layout of the module it replaces, so its own state-dict hooks
say how its parameters follow from the stock ones, and gradients of both are taken with respect to those.

torchtitan is imported when an override is asked for, by the override's own module.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import torch
from torch.func import functional_call

from bridge.capture.record import Call
from bridge.errors import SpecError, UsageError, near_misses
from bridge.verify import kernelfile, registry
from bridge.verify.bind import CapturedCall
from bridge.verify.lent import asking, lend_to_cpu
from bridge.verify.registry import LoadedSpec
from bridge.verify.spec import KernelSpec

if TYPE_CHECKING:
    from bridge.capture.store import Capture

_REGISTRY = "torchtitan.config.override"
#: Names that `_arguments` gives to tensors passed by position.
_PLACE = re.compile(r"x\d*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Stock module and replacement for one place of the model, without weights of their own."""

    stock: torch.nn.Module
    replacement: torch.nn.Module
    names: tuple[str, ...]  #: parameters and buffers of the stock module


def override_spec(name: str, capture: Capture) -> LoadedSpec:
    """A spec for the override factory `module.function`.

    Raises:
        UsageError: no such override, or the capture has no call of it with the config that made it.
        SpecError: the captured parameters do not fit the modules.
    """
    registry.prepare_triton()
    found = _find(name, capture)
    return _make_spec(name, found, _options(name, capture), capture)


def site_override(site: str, capture: Capture) -> str | None:
    """Name of the override, among those of the captured run, that put the module class `site` in place."""
    registry.prepare_triton()
    for entry in _imports(capture):
        name = entry.partition("=")[0]
        try:
            found = _find(name, capture)
        except UsageError:
            continue
        for call in capture.calls:
            if call.kind == "module" and call.op == site:
                config = _stock_config(found.target_cls, call, capture)
                if config is None:
                    break
                made = _replacement(found, config, _options(name, capture))
                if type(made)._owner.__name__ == site:
                    return name
                break
    return None


def _imports(capture: Capture) -> list[str]:
    section = capture.manifest.config.get("override")
    entries = section.get("imports", []) if isinstance(section, Mapping) else []
    return [entry if isinstance(entry, str) else str(entry[0]) for entry in entries]


def _options(name: str, capture: Capture) -> dict[str, Any]:
    """Keyword arguments that the run gave the override: `name={"key": value}` among its imports."""
    section = capture.manifest.config.get("override")
    entries = section.get("imports", []) if isinstance(section, Mapping) else []
    for entry in entries:
        if isinstance(entry, str):
            head, _, tail = entry.partition("=")
            if head == name and tail:
                return dict(json.loads(tail))
        elif entry and entry[0] == name and len(entry) > 1 and isinstance(entry[1], Mapping):
            return dict(entry[1])
    return {}


def _find(name: str, capture: Capture) -> Any:
    module, _, function = name.rpartition(".")
    known = [entry.partition("=")[0] for entry in _imports(capture)]
    kernelfile.see_folder()
    try:
        importlib.import_module(module)
        overrides: dict[str, Any] = importlib.import_module(_REGISTRY)._REGISTRY
    except ImportError as error:
        raise UsageError(
            f"unknown op {name!r}: {error}; overrides of the captured run: {', '.join(known) or 'none'}; "
            f"{near_misses(name, registry.known_names())}"
        ) from None
    if name not in overrides:
        here = [key for key in overrides if key.startswith(f"{module}.")]
        raise UsageError(f"{module} registers no override {function!r}; {near_misses(name, here)}")
    return overrides[name]


def _stock_config(config_class: type, call: Call, capture: Capture) -> Any | None:
    """The stock module's config at the call's place, rebuilt from the manifest; None where it has none."""
    model = capture.manifest.config.get("model_spec")
    node: Any = model.get("model") if isinstance(model, Mapping) else None
    for part in call.module.split("."):
        if isinstance(node, Mapping) and part in node:
            node = node[part]
        elif isinstance(node, Sequence) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        else:
            return None
    wanted = {field.name for field in fields(config_class) if not field.name.startswith("_")}
    # The manifest names no classes; a node with other fields is another module's.
    if not (isinstance(node, Mapping) and wanted == set(node)):
        return None
    inside = f"{call.module}."
    held = (other for other in capture.calls if other.kind == "module" and other.module.startswith(inside))
    return _from_dict(config_class, node, call.module, {other.module: other.op for other in held})


def _from_dict(config_class: type, values: Mapping[str, Any], path: str, classes: Mapping[str, str]) -> Any:
    """Rebuild a config dataclass; initialisers and shardings, which no call needs, stay at their defaults.

    classes: module class of the captured calls inside `path`, which say what a field of a base type held.
    """
    try:
        hints = get_type_hints(config_class)
    except (NameError, TypeError):
        hints = {}
    given: dict[str, Any] = {}
    for field in fields(config_class):
        if not field.init or field.name not in values or field.name in ("param_init", "sharding_config"):
            continue
        value = values[field.name]
        inner = _config_type(hints.get(field.name, field.type))
        if inner is not None and isinstance(value, Mapping):
            place = f"{path}.{field.name}"
            value = _from_dict(_config_of(classes.get(place), inner), value, place, classes)
        given[field.name] = value
    return config_class(**given)


def _config_type(hint: Any) -> type | None:
    for candidate in (hint, *get_args(hint)):
        if isinstance(candidate, type) and is_dataclass(candidate):
            return candidate
    return None


def _config_of(module_class: str | None, base: Any) -> Any:
    """`base`, or the config derived from it whose module class has this name."""
    queue = [base]
    for config in queue:
        if config._owner is not None and config._owner.__name__ == module_class:
            return config
        queue += config.__subclasses__()
    return base


def _replacement(found: Any, config: Any, options: Mapping[str, Any]) -> Any:
    """The config that the override puts in place of `config`.

    Raises:
        UsageError: the override needs a package that is not installed.
    """
    try:
        return found.factory(config, **options)
    except ImportError as error:
        # An override that loads without its package says so when it is used, for the import that failed.
        package = error.name or getattr(error.__cause__, "name", None)
        if package is None:
            raise
        package = package.partition(".")[0]
        raise UsageError(
            f"{found.name} needs the package {package}, which is not installed; pip install {package}"
        ) from None


def _build(found: Any, options: Mapping[str, Any], call: Call, capture: Capture) -> Pair:
    config = _stock_config(found.target_cls, call, capture)
    if config is None:
        raise UsageError(
            f"capture {capture.path} does not hold the torchtitan config of module {call.module!r}, which "
            f"{found.name} replaces; capture with `bridge capture --config train.toml`"
        )
    # Without memory: every parameter comes from the capture, and one that does not cannot go unnoticed.
    with torch.device("meta"):
        try:
            stock = config.build()
        except (TypeError, NotImplementedError) as error:
            raise UsageError(
                f"capture {capture.path} does not say which modules {call.module!r} is made of ({error}); "
                f"judge {found.name} on a capture of the run without it"
            ) from error
        replacement = _replacement(found, config, options).build()
    names = (*dict(stock.named_parameters()), *dict(stock.named_buffers()))
    return Pair(stock=stock, replacement=replacement, names=names)


def _make_spec(name: str, found: Any, options: Mapping[str, Any], capture: Capture) -> LoadedSpec:
    stock_name = found.target_cls._owner.__name__
    candidates = [call for call in capture.calls if call.kind == "module" and call.phase == "forward"]
    first = next((call for call in candidates if _belongs(call, found, options, capture)), None)
    if first is None:
        held = {call.op for call in candidates}
        raise UsageError(
            f"capture {capture.path} has no call of {stock_name} or of what {name} puts in its place; "
            f"{near_misses(stock_name, held)} Recapture with --ops {stock_name}"
        )
    pairs: dict[str, Pair] = {}

    def pair(call: Call) -> Pair:
        if call.module not in pairs:
            pairs[call.module] = _build(found, options, call, capture)
        return pairs[call.module]

    modules = pair(first)
    arguments = _arguments(first)
    inputs = (*arguments, *modules.names)
    outputs = ("y",) if len(first.outputs) == 1 else tuple(f"y{i}" for i in range(len(first.outputs)))
    parameters = dict(modules.stock.named_parameters())
    constants = {int(key): value for key, value in first.attrs.items() if key.isdigit()}
    floating = [key for key, record in zip(arguments, first.inputs, strict=True) if "float" in record.dtype]
    shape = tuple(max(size, 1) for size in first.inputs[0].shape) or (1,)

    def bind(view: CapturedCall) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        here = pair(view.call)
        stock = stock_parameters(here, view)
        return (*view.inputs.values(), *(stock[key] for key in here.names)), {"site": view.call.module}

    def sample(
        shape: Any, dtype: torch.dtype, generator: torch.Generator, device: str
    ) -> tuple[torch.Tensor, ...]:
        sizes = [record.shape for record in first.inputs]
        sizes += [
            tuple(tensor.shape)
            for tensor in (*parameters.values(), *dict(modules.stock.named_buffers()).values())
        ]
        return tuple(torch.randn(size, generator=generator, device=device).to(dtype) for size in sizes)

    file = kernelfile.file_of(found.factory)
    spec = KernelSpec(
        name=name,
        reference=_caller(pairs, arguments, constants, replacement=False),
        target=_caller(pairs, arguments, constants, replacement=True, file=file),
        sample=sample,
        inputs=inputs,
        outputs=outputs,
        grads=(*floating, *parameters),
        attrs={"site": first.module},
        kind="other",
        shapes=(shape,),
        dtypes=(first.inputs[0].dtype,),
        sites=tuple(dict.fromkeys((type(modules.replacement).__name__, stock_name))),
        bind=bind,
    )
    lend_to_cpu()
    digest = kernelfile.source_digest([file]) if file is not None else None
    return LoadedSpec(spec=spec, source=name, origin="override", file=file, sha256=digest)


def recipe(name: str, site: str, capture: Capture) -> dict[str, Any]:
    """What rebuilds the modules of one place without bridge: the stock config's fields, the options."""
    node: Any = capture.manifest.config["model_spec"]["model"]
    for part in site.split("."):
        node = node[int(part)] if part.isdigit() else node[part]
    return {"config": node, "options": _options(name, capture)}


def _belongs(call: Call, found: Any, options: Mapping[str, Any], capture: Capture) -> bool:
    if call.op == found.target_cls._owner.__name__:
        return True
    config = _stock_config(found.target_cls, call, capture) if call.inputs else None
    return config is not None and type(_replacement(found, config, options))._owner.__name__ == call.op


def _arguments(call: Call) -> tuple[str, ...]:
    """Names for the call's tensor arguments: x, x1, ... by position, or the keyword."""
    names = []
    for record in call.inputs:
        if not (record.name.isdigit() or record.name.isidentifier()):
            raise SpecError(
                f"captured {call.key} takes tensors inside a list or dict (argument {record.name}); "
                "write a KernelSpec with `bind` for it"
            )
        names.append(
            record.name if record.name.isidentifier() else "x" if record.name == "0" else f"x{record.name}"
        )
    return tuple(names)


def _caller(
    pairs: Mapping[str, Pair],
    arguments: tuple[str, ...],
    constants: Mapping[int, Any],
    *,
    replacement: bool,
    file: Path | None = None,
) -> Callable[..., Any]:
    """Calls stock module or replacement as the run did: `constants` and None stand between the tensors."""
    places = [0 if name == "x" else int(name[1:]) for name in arguments if _PLACE.fullmatch(name)]

    def run(*tensors: torch.Tensor, site: str) -> Any:
        here = pairs[site]
        state = dict(zip(here.names, tensors[len(arguments) :], strict=True))
        module = here.stock
        if replacement:
            module, state = here.replacement, own_parameters(here.replacement, state)
        given, split = tensors[: len(arguments)], len(places)
        tensor_at = dict(zip(places, given[:split], strict=True))
        count = max((*places, *constants), default=-1) + 1
        positional = tuple(tensor_at.get(place, constants.get(place)) for place in range(count))
        named = dict(zip(arguments[split:], given[split:], strict=True))
        with asking(file), _no_mesh():
            return functional_call(module, state, positional, named)

    return run


@contextmanager
def _no_mesh() -> Iterator[None]:
    """Without torchtitan's checks of sharding types, which want the mesh of a run."""
    utils: Any = sys.modules.get("torchtitan.distributed.utils")
    before = utils.get_spmd_backend() if hasattr(utils, "set_spmd_backend") else None
    if before is None:
        yield
        return
    utils.set_spmd_backend("partial_dtensor")
    try:
        yield
    finally:
        utils.set_spmd_backend(before)


def own_parameters(module: torch.nn.Module, stock: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A replacement's own parameters from stock ones, differentiably, by its load hooks."""
    state = dict(stock)
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        for hook in part._load_state_dict_pre_hooks.values():
            hook(state, prefix, {}, True, [], [], [])
    own = {*dict(module.named_parameters()), *dict(module.named_buffers())}
    lacking = own - set(state)
    if lacking:
        raise SpecError(
            f"the load hooks of {type(module).__name__} make no {', '.join(sorted(lacking))} from stock ones"
        )
    return {key: state[key] for key in own}


def stock_parameters(pair: Pair, view: CapturedCall) -> dict[str, torch.Tensor]:
    """The captured parameters in the stock layout, by the replacement's save hooks where it was in place."""
    held = dict(view.params)
    if view.call.op == type(pair.replacement).__name__ != type(pair.stock).__name__:
        module = pair.replacement
        for key, tensor in view.params.items():
            path, _, leaf = key.rpartition(".")
            part = module.get_submodule(path)
            if leaf in part._parameters:
                part._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)
            else:
                part._buffers[leaf] = tensor
        held |= module.state_dict()
    lacking = [key for key in pair.names if key not in held]
    if lacking:
        got = ", ".join(view.params) or "none"
        raise SpecError(
            f"captured {view.call.key} must hold {', '.join(pair.names)}, got {got}; "
            f"capture the step with --ops {type(pair.stock).__name__}, which keeps a call's parameters"
        )
    return held
