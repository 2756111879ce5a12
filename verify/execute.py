"""Run one implementation on one case: outputs, gradients, and what it did to its inputs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from bridge.verify.bits import OverwrittenError, as_marked, mark, same_bits
from bridge.verify.case import Case
from bridge.verify.interpreter import repaired
from bridge.verify.launches import watch
from bridge.verify.memory import Watched
from bridge.verify.spec import KernelSpec

#: What is said of a gradient that only a second backward gets wrong.
_SECOND = "a second backward over the same graph gives other values"
#: What autograd says when an input that needs a gradient is written in place.
_LEAF_WRITTEN = "a leaf Variable that requires grad"


@dataclass(slots=True)
class Result:
    """What came back; tensors detached. A gradient is keyed by its input's name."""

    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    grads: dict[str, torch.Tensor | None] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)  #: tensor name -> misdeed, in words
    differing: dict[str, list[torch.Tensor]] = field(default_factory=dict)  #: repeats with other bits
    doubted: dict[str, str] = field(default_factory=dict)  #: what is to be said of a repeat that is wrong
    owners: dict[str, int] = field(default_factory=dict)  #: address of the memory each gradient came in
    kernels: tuple[str, ...] = ()
    tiles: tuple[int, ...] = ()
    autotuned: bool = False  #: an autotuner chose among configurations
    device: str = ""  #: where `run_target` ran it
    watched: bool = False  #: made by `run_target`, so it can be made again

    def named(self) -> dict[str, torch.Tensor | None]:
        """All results under the names of the verdict table."""
        return {**self.outputs, **{f"grad_{name}": grad for name, grad in self.grads.items()}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Twice:
    """How to run backward a second time.

    upstream: the upstream gradients as they were.
    clone: keep copies of the first results, however large; else large ones must not be written again.
    """

    upstream: tuple[torch.Tensor, ...]
    clone: bool = False


def tensor_names(spec: KernelSpec) -> tuple[str, ...]:
    """Names of every judged tensor, outputs first."""
    return (*spec.outputs, *(f"grad_{name}" for name in spec.grads))


def copy_with_layout(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same sizes, strides, offset and surroundings, in memory of its own."""
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage()).clone()
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def split(returned: Any, count: int) -> tuple[torch.Tensor, ...] | str:
    """What a callable returned as a tuple of `count` tensors, or the complaint."""
    items = tuple(returned) if isinstance(returned, tuple | list) else (returned,)
    if len(items) != count:
        return f"must return {count} tensor(s) as `outputs` names, got {len(items)}"
    for item in items:
        if not isinstance(item, torch.Tensor):
            return f"must return tensors, got {type(item).__name__}"
    return items


def run(
    function: Callable[..., Any],
    spec: KernelSpec,
    case: Case,
    *,
    inputs: tuple[torch.Tensor, ...] | None = None,
    grad_outputs: tuple[torch.Tensor, ...] | None = None,
    context: Any = None,
    twice: Twice | None = None,
) -> Result | str:
    """Run `function` forward, and backward when the spec names gradients.

    Args:
        inputs: stand-ins for the case's inputs (golden's FP64 copies); copied with layout when None.
        context: a context manager around forward and backward, such as a dispatch mode.
        twice: run backward twice; a second result with other bits is kept, to be judged as well.

    Returns:
        The result, or a complaint about what was returned.
    """
    values = inputs if inputs is not None else tuple(copy_with_layout(t) for t in case.inputs)
    upstream = (
        grad_outputs if grad_outputs is not None else tuple(copy_with_layout(t) for t in case.grad_outputs)
    )
    wanted = [i for i, name in enumerate(spec.inputs) if name in spec.grads]
    leaves = tuple(
        v.detach().requires_grad_(i in wanted and v.is_floating_point()) for i, v in enumerate(values)
    )
    with context if context is not None else nullcontext(), torch.enable_grad():
        try:
            outputs = split(function(*leaves, **case.attrs), len(spec.outputs))
        except SystemExit as error:
            # As any other exception of a kernel: it must not end the judgement.
            raise RuntimeError(f"it calls sys.exit({error.code!r})") from error
        if isinstance(outputs, str):
            return outputs
        result = Result(outputs={n: o.detach() for n, o in zip(spec.outputs, outputs, strict=True)})
        if isinstance(context, Watched):
            result.faults |= {name: text for text in context.overruns() for name in spec.outputs}
        if spec.grads and wanted:
            result.grads = _backward(spec, outputs, leaves, upstream, wanted, result, twice=twice)
    return result


def _backward(
    spec: KernelSpec,
    outputs: tuple[torch.Tensor, ...],
    leaves: tuple[torch.Tensor, ...],
    upstream: tuple[torch.Tensor, ...],
    wanted: list[int],
    result: Result,
    *,
    twice: Twice | None,
) -> dict[str, torch.Tensor | None]:
    pairs = [(o, _shaped(g, o)) for o, g in zip(outputs, upstream, strict=False) if o.requires_grad]
    names = [spec.inputs[i] for i in wanted]
    if not pairs or any(o.shape != g.shape for o, g in pairs):
        return dict.fromkeys(names)
    roots = tuple(o for o, _ in pairs)
    grads_in = tuple(g if g.dtype == o.dtype else g.to(o.dtype) for o, g in pairs)
    sources = tuple(leaves[i] for i in wanted)
    # torch's stubs promise tensors; with allow_unused an input that nothing used gets None.
    grads: tuple[torch.Tensor | None, ...] = torch.autograd.grad(
        roots, sources, grads_in, retain_graph=twice is not None, allow_unused=True
    )
    result.owners = {
        f"grad_{n}": g.untyped_storage().data_ptr()
        for n, g in zip(names, grads, strict=True)
        if g is not None
    }
    if twice is not None:
        kept = [_shaped(g, o) for o, g in zip(outputs, twice.upstream, strict=False) if o.requires_grad]
        marks = tuple(mark(g, clone=twice.clone) if g is not None else None for g in grads)
        # What the first backward left in the upstream gradients must not pass for the second one's doing.
        fresh = tuple(_unwritten(g, was) for g, was in zip(grads_in, kept, strict=True))
        try:
            second: tuple[torch.Tensor | None, ...] = torch.autograd.grad(
                roots, sources, fresh, allow_unused=True
            )
        except RuntimeError:
            second = ()  # refusing a second backward is legal; only a silent wrong one is not
        first = tuple(
            as_marked(g, m) if g is not None and m is not None else None
            for g, m in zip(grads, marks, strict=True)
        )
        for name, a, b in zip(names, first, second, strict=False):
            if a is not None and b is not None and not same_bits(a, b):
                result.differing.setdefault(f"grad_{name}", []).append(b.detach())
                result.doubted[f"grad_{name}"] = _SECOND
        grads = first
    return {n: (g.detach() if g is not None else None) for n, g in zip(names, grads, strict=True)}


def _shaped(upstream: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """The upstream gradient in the shape of an output that should have had its shape, where that can be."""
    if upstream.shape == output.shape or upstream.numel() != output.numel():
        return upstream
    return upstream.reshape(output.shape)


def _unwritten(given: torch.Tensor, was: torch.Tensor) -> torch.Tensor:
    """`given` if it still holds what it held, else a fresh copy of that."""
    was = was if was.dtype == given.dtype else was.to(given.dtype)
    return given if same_bits(given, was) else copy_with_layout(was)


def run_target(
    spec: KernelSpec, case: Case, *, twice: bool = False, fill: float = float("nan"), clone: bool = False
) -> Result | str:
    """Run the target under watch: launches, poisoned memory, guard bands, inputs compared afterwards.

    Args:
        twice: run the backward twice over one graph.
        fill: what memory holds that the target is handed and has not written.
        clone: keep copies of what the first backward gives, however large.
    """
    inputs = tuple(copy_with_layout(t) for t in case.inputs)
    upstream = tuple(copy_with_layout(t) for t in case.grad_outputs)
    with repaired(), watch() as seen:
        watched = Watched(fill=fill)
        try:
            result = run(
                spec.target,
                spec,
                case,
                inputs=inputs,
                grad_outputs=upstream,
                context=watched,
                twice=Twice(upstream=case.grad_outputs, clone=clone) if twice else None,
            )
        except OverwrittenError:
            # The second backward wrote where the first one's results are, which is legal.
            return run_target(spec, case, twice=True, fill=fill, clone=True)
        except RuntimeError as error:
            if _LEAF_WRITTEN not in str(error):
                raise
            return _writes_leaf(spec, case)
    if isinstance(result, str):
        return result
    result.kernels, result.tiles, result.watched = tuple(seen.kernels), seen.tiles(), True
    result.autotuned = bool(seen.tuners)
    result.device = str(inputs[0].device) if inputs else "cpu"
    _blame_writes(spec, case, inputs, upstream, result)
    if twice and any("was written to" in text for text in result.faults.values()):
        # A kept graph makes autograd copy what it returns; a plain run shows which result sits in the victim.
        once = run_target(spec, case)
        if isinstance(once, Result):
            result.faults = once.faults
    if not any(name in result.faults for name in spec.outputs):
        for text in watched.overruns():
            for name in spec.grads:
                result.faults.setdefault(f"grad_{name}", text)
    return result


def _writes_leaf(spec: KernelSpec, case: Case) -> Result | str:
    """The result of a target that autograd kept from writing into an input: run again without gradients."""
    inputs = tuple(copy_with_layout(t) for t in case.inputs)
    with repaired(), watch() as seen:
        result = run(spec.target, replace(spec, grads=()), case, inputs=inputs, context=Watched())
    if isinstance(result, str):
        return result
    result.kernels, result.tiles = tuple(seen.kernels), seen.tiles()
    result.grads = dict.fromkeys(spec.grads)
    _blame_writes(spec, case, inputs, (), result)
    said = next(iter(result.faults.values()), "an input was written to")
    text = f"{said} (autograd refuses it: no gradient can be had)"
    result.faults = dict.fromkeys(tensor_names(spec), text)
    return result


def _blame_writes(
    spec: KernelSpec,
    case: Case,
    inputs: tuple[torch.Tensor, ...],
    upstream: tuple[torch.Tensor, ...],
    result: Result,
) -> None:
    """Name the results answerable for a write into inputs or upstream gradients."""
    for name, before, after in zip(spec.inputs, case.inputs, inputs, strict=True):
        if not same_bits(before, after):
            _blame(result, after, f"the input `{name}` was written to", tuple(spec.outputs))
    for name, before, after in zip(spec.outputs, case.grad_outputs, upstream, strict=False):
        if not same_bits(before, after):
            grads = tuple(f"grad_{g}" for g in spec.grads)
            _blame(result, after, f"grad_output of `{name}` was written to", grads)


def _blame(result: Result, victim: torch.Tensor, text: str, otherwise: tuple[str, ...]) -> None:
    address = victim.untyped_storage().data_ptr()
    sharing = [
        n for n, t in result.named().items() if t is not None and t.untyped_storage().data_ptr() == address
    ]
    for name in sharing or otherwise:
        result.faults[name] = text
