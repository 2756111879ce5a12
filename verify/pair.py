"""Judge any function or custom op against an eager twin, without a spec.

bridge verify --reference pkg.eager --target-fn torch.ops.mylib.fused --from capture/
bridge verify --reference eager.py:norm --target-fn pkg.fused_norm --shape 8x256
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bridge.capture.record import Call
from bridge.errors import UsageError, brief, near_misses
from bridge.verify import kernelfile, registry
from bridge.verify.registry import LoadedSpec
from bridge.verify.spec import KernelSpec

if TYPE_CHECKING:
    from bridge.capture.store import Capture


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One parameter of the target."""

    name: str
    tensor: bool
    default: Any = inspect.Parameter.empty


def pair_spec(
    reference: str,
    target: str,
    *,
    op: str | None = None,
    capture: Capture | None = None,
    shapes: Sequence[tuple[int, ...]] = (),
    dtypes: Sequence[str] = (),
) -> LoadedSpec:
    """A spec for `target` with `reference` as its eager twin; both are called with the same arguments.

    Args:
        reference, target: "package.module.name", "torch.ops.namespace.op" or "file.py:name".
        op: where the target occurs in the capture, when its own name does not say it.
        capture: inputs; without one every tensor argument is drawn with each of `shapes`.

    Raises:
        UsageError: a name cannot be found, or nothing says what the inputs are.
    """
    registry.prepare_triton()
    eager, kernel = resolve(reference), resolve(target)
    arguments = arguments_of(kernel) or arguments_of(eager)
    site = op or site_of(kernel, target)
    if capture is not None:
        first = _first_call(capture, site)
        names = _names(first, arguments)
        sizes = {name: record.shape for name, record in zip(names, _ordered(first), strict=True)}
        declared: tuple[tuple[int, ...], ...] = (
            tuple(max(n, 1) for n in next(iter(sizes.values()))) or (1,),
        )
        kinds: tuple[str, ...] = (
            next((r.dtype for r in first.inputs if "float" in r.dtype), first.inputs[0].dtype),
        )
        given = dict(first.attrs)
    else:
        names = tuple(argument.name for argument in arguments if argument.tensor)
        if not names or not shapes:
            raise UsageError(
                f"nothing says what inputs {target} takes: give a capture with --from DIR, or sizes with "
                "--shape for a target whose tensor arguments are annotated"
            )
        sizes, given = {}, {}
        declared, kinds = tuple(shapes), tuple(dtypes) or ("float32",)
    attrs = {
        argument.name: given.get(argument.name, argument.default)
        for argument in arguments
        if argument.name not in names
        and (argument.name in given or argument.default is not inspect.Parameter.empty)
    }

    def sample(
        shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: str
    ) -> tuple[torch.Tensor, ...]:
        drawn = (torch.randn(sizes.get(name, shape), generator=generator, device=device) for name in names)
        return tuple(tensor.to(dtype) for tensor in drawn)

    run_eager, run_kernel = _by_name(eager, names), _by_name(kernel, names)
    floating = _floating(names, capture, site)
    outputs, differentiable = _probe(run_eager, run_kernel, sample, declared[0], kinds[0], attrs)
    spec = KernelSpec(
        name=target.rpartition(":")[2].rpartition(".")[2],
        reference=run_eager,
        target=run_kernel,
        sample=sample,
        inputs=names,
        outputs=outputs,
        grads=tuple(name for name in names if name in floating) if differentiable else (),
        attrs=attrs,
        kind="other",
        shapes=declared,
        dtypes=kinds,
        sites=(site,),
    )
    file = kernelfile.file_of(getattr(kernel, "_init_fn", kernel))
    digest = kernelfile.source_digest([file]) if file is not None and file.is_file() else None
    return LoadedSpec(spec=spec, source=target, origin="functions", file=file, sha256=digest)


def resolve(name: str) -> Callable[..., Any]:
    """The callable of a dotted name or of FILE:NAME.

    Raises:
        UsageError: it does not exist or cannot be called.
    """
    path, attribute = kernelfile.split_source(name)
    if path.suffix == ".py" and attribute is not None:
        holder: Any = kernelfile.run_file(Path(path))
        parts = [attribute]
    else:
        holder, parts = import_longest(name)
    for part in parts:
        try:
            holder = getattr(holder, part)
        except (AttributeError, RuntimeError):
            raise UsageError(f"{name}: there is no {part!r}; {near_misses(part, dir(holder))}") from None
    if not callable(holder):
        raise UsageError(f"{name} must be callable, got {type(holder).__name__}")
    found: Callable[..., Any] = holder
    return found


def import_longest(name: str) -> tuple[Any, list[str]]:
    """The module that a dotted name begins with, and the names that remain.

    Raises:
        UsageError: no part of it can be imported, or a module that exists fails to.
    """
    kernelfile.see_folder()
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:count])
        try:
            return importlib.import_module(module), parts[count:]
        except ModuleNotFoundError as error:
            # An import that fails inside an existing module is that module's trouble, not a shorter name.
            if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
                raise UsageError(f"importing {module} for {name} raised {error}") from None
        except Exception as error:
            raise UsageError(
                f"importing {module} for {name} raised {type(error).__name__}: {brief(error)}"
            ) from error
    raise UsageError(f"{name} must be a dotted name such as package.module.function, or FILE.py:NAME")


def arguments_of(function: Any) -> tuple[Argument, ...]:
    """Parameters of a dispatcher op by its schema, of a function by its signature; () when it has neither."""
    schema = _schema(function)
    if schema is not None:
        return tuple(
            Argument(
                name=argument.name,
                tensor="Tensor" in str(argument.type),
                default=argument.default_value if argument.has_default_value() else inspect.Parameter.empty,
            )
            for argument in schema.arguments
        )
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(
        Argument(name=item.name, tensor="Tensor" in str(item.annotation), default=item.default)
        for item in parameters
        if item.kind in named
    )


def _schema(function: Any) -> Any | None:
    overload = getattr(function, "_opoverload", None) or getattr(function, "default", None) or function
    return getattr(overload, "_schema", None)


def site_of(function: Any, name: str) -> str:
    """Where the target occurs in a capture: its op's qualified name, else its own."""
    schema = _schema(function)
    return str(schema.name) if schema is not None else name.rpartition(":")[2].rpartition(".")[2]


def _first_call(capture: Capture, site: str) -> Call:
    calls = [call for call in capture.find(site) if call.phase == "forward" and call.inputs]
    if not calls:
        held = {call.op.rpartition(".")[0] or call.op for call in capture.calls if call.kind != "module"}
        raise UsageError(
            f"capture {capture.path} has no forward call of {site}; {near_misses(site, held)} "
            "Name where it occurs with --op GLOB"
        )
    return calls[0]


def _ordered(call: Call) -> list[Any]:
    return sorted(
        call.inputs,
        key=lambda record: (not record.name.isdigit(), int(record.name) if record.name.isdigit() else 0),
    )


def _names(call: Call, arguments: Sequence[Argument]) -> tuple[str, ...]:
    names = []
    for record in _ordered(call):
        if record.name.isdigit():
            place = int(record.name)
            names.append(arguments[place].name if place < len(arguments) else f"x{place}")
        else:
            names.append(record.name)
    return tuple(names)


def _by_name(function: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """Tensors by their parameters' names: scalars may stand between them in the signature."""

    def call(*tensors: torch.Tensor, **attrs: Any) -> Any:
        return function(**dict(zip(names, tensors, strict=True)), **attrs)

    return call


def _floating(names: Sequence[str], capture: Capture | None, site: str) -> frozenset[str]:
    if capture is None:
        return frozenset(names)
    records = _ordered(_first_call(capture, site))
    return frozenset(name for name, record in zip(names, records, strict=True) if "float" in record.dtype)


def _probe(
    reference: Callable[..., Any],
    target: Callable[..., Any],
    sample: Callable[..., Any],
    shape: tuple[int, ...],
    dtype: str,
    attrs: Mapping[str, Any],
) -> tuple[tuple[str, ...], bool]:
    """Names of the outputs, and whether the target has a gradient, from one run on drawn inputs."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device=device).manual_seed(0)
    tensors = sample(shape, getattr(torch, dtype), generator, device)
    try:
        returned = reference(*tensors, **attrs)
    except Exception as error:
        sizes = [tuple(tensor.shape) for tensor in tensors]
        text = f"the reference must run on {sizes}, got {type(error).__name__}: {error}"
        raise UsageError(text) from error
    count = len(returned) if isinstance(returned, tuple | list) else 1
    names = ("output",) if count == 1 else tuple(f"output{i}" for i in range(count))
    try:
        outputs = target(*(tensor.requires_grad_(tensor.is_floating_point()) for tensor in tensors), **attrs)
        first = outputs[0] if isinstance(outputs, tuple | list) else outputs
        first.double().sum().backward()
    except Exception:
        # No gradient, or none of its own: the forward is judged, and a target that cannot run is told there.
        return names, False
    return names, True
