"""KernelSpec, the public contract with authors of kernels (docs/kernel-spec.md), and its checks.

Importing this module loads no torch: a spec is data plus callables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from bridge.errors import SpecError, near_misses

KINDS = ("elementwise", "reduction", "matmul", "other")
DTYPES = ("float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """What `bridge verify` needs to know about one kernel.

    Raises SpecError, naming the field and what was expected, when the parts do not fit together.
    """

    name: str
    reference: Callable[..., Any]
    target: Callable[..., Any]
    sample: Callable[..., Any]
    inputs: tuple[str, ...]
    kind: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    golden: Callable[..., Any] | None = None
    outputs: tuple[str, ...] = ("output",)
    grads: tuple[str, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)
    sites: tuple[str, ...] = ()
    bind: Callable[..., Any] | None = None
    per_item: bool = False
    adversarial: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    per_term: Callable[..., Any] | None = None
    faults: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    fudge_factor: float = 2.0
    project_atol: float = 0.0
    max_reference_relative_error: float = 0.1

    def __post_init__(self) -> None:
        _check(self)


def _fail(name: str, message: str) -> SpecError:
    return SpecError(f"KernelSpec field `{name}` {message}")


def _check(spec: KernelSpec) -> None:
    given: object = spec.name  # authors are not made to check their types
    if not isinstance(given, str) or not given:
        raise _fail("name", f"must be a non-empty string, got {spec.name!r}")
    for name in ("reference", "target", "sample"):
        if not callable(getattr(spec, name)):
            raise _fail(name, f"must be callable, got {getattr(spec, name)!r}")
    for name in ("golden", "bind", "per_term"):
        value = getattr(spec, name)
        if value is not None and not callable(value):
            raise _fail(name, f"must be callable or left out, got {value!r}")
    if not isinstance(spec.per_item, bool):
        raise _fail("per_item", f"must be True or False, got {spec.per_item!r}")
    for name in ("inputs", "outputs", "grads", "sites", "dtypes"):
        value = getattr(spec, name)
        if isinstance(value, str) or not all(isinstance(item, str) for item in _sequence(name, value)):
            raise _fail(name, f"must be a tuple of strings, got {value!r}")
        if name != "sites" and len(set(value)) != len(value):
            raise _fail(name, f"must not repeat a name, got {value!r}")
        object.__setattr__(spec, name, tuple(value))
    for name in ("inputs", "outputs", "dtypes"):
        if not getattr(spec, name):
            raise _fail(name, "must not be empty")
    for grad in spec.grads:
        if grad not in spec.inputs:
            raise _fail("grads", f"names {grad!r}, which is not in inputs {spec.inputs}")
        if f"grad_{grad}" in spec.outputs:
            raise _fail("outputs", f"names 'grad_{grad}', which is what the gradient of {grad!r} is called")
    for dtype in spec.dtypes:
        if dtype not in DTYPES:
            raise _fail("dtypes", f"has {dtype!r}; {near_misses(dtype, DTYPES)}")
    if spec.kind not in KINDS:
        raise _fail("kind", f"must be one of {', '.join(KINDS)}, got {spec.kind!r}")
    _check_shapes(spec)
    for name in ("adversarial", "faults"):
        value = getattr(spec, name)
        if not isinstance(value, Mapping) or not all(
            isinstance(k, str) and callable(v) for k, v in value.items()
        ):
            raise _fail(name, f"must map names to callables, got {value!r}")
    if not isinstance(spec.attrs, Mapping):
        raise _fail("attrs", f"must map keyword arguments to values, got {spec.attrs!r}")
    clash = set(spec.attrs) & set(spec.inputs)
    if clash:
        raise _fail("attrs", f"repeats the inputs {sorted(clash)}")
    for name, least in (("fudge_factor", 1.0), ("project_atol", 0.0), ("max_reference_relative_error", 0.0)):
        value = getattr(spec, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < float("inf"):
            raise _fail(name, f"must be a finite number >= {least:g}, got {value!r}")


def _sequence(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, tuple | list):
        raise _fail(name, f"must be a tuple, got {value!r}")
    return tuple(value)


def _check_shapes(spec: KernelSpec) -> None:
    shapes = _sequence("shapes", spec.shapes)
    if not shapes:
        raise _fail("shapes", "must not be empty: declare the production sizes and the smallest legal one")
    for shape in shapes:
        sizes = _sequence("shapes", shape)
        if not sizes or not all(
            isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes
        ):
            raise _fail("shapes", f"must hold tuples of positive integers, got {shape!r}")
    object.__setattr__(spec, "shapes", tuple(tuple(shape) for shape in shapes))


def field_names() -> tuple[str, ...]:
    """Names of all fields, for the message about an unknown one."""
    return tuple(item.name for item in fields(KernelSpec))
