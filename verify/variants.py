"""Wrong variants of the reference, derived from its own ops: what a faulty kernel would compute.

Used twice: put in the target's place they show which faults the inputs could have revealed (power), and
compared with a failing target they name its fault (diagnosis). The order of `RANKS` is the workflow's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from bridge.verify.case import Case
from bridge.verify.handed import of_results, of_saved
from bridge.verify.masks import of_mask
from bridge.verify.scans import of_scan
from bridge.verify.spec import KernelSpec
from bridge.verify.sums import of_product, of_products, of_sum
from bridge.verify.trace import Change, Op, Trace
from bridge.verify.variant import Variant, numbered

#: Functions whose derivative is one factor of the backward.
_HAVE_DERIVATIVES = ("tanh", "sigmoid", "exp", "erf", "sin", "cos", "clamp", "relu")


def catalogue(spec: KernelSpec, trace: Trace, case: Case, tiles: tuple[int, ...]) -> list[Variant]:
    """Every variant that this reference has on this case."""
    found = [Variant(text=name, rank="formula", function=f) for name, f in spec.faults.items()]
    found.append(Variant(text="zeros are returned", rank="formula", function=_zeros(spec)))
    if case.grad_outputs:
        found += _upstream_variants()
    found += _input_variants()
    found += _store_variants(trace, case)
    for op in trace.ops.values():
        found += list(_of_op(op, trace, case, tiles))
    found += of_products(trace)
    found += of_saved(spec, trace, case)
    found += of_results(spec, trace, case)
    return numbered(found)


def _zeros(spec: KernelSpec) -> Callable[..., Any]:
    def zeros(*inputs: torch.Tensor, **attrs: Any) -> Any:
        made = spec.reference(*inputs, **attrs)
        return tuple(m * 0 for m in made) if isinstance(made, tuple | list) else made * 0

    return zeros


def subject(op: Op) -> str:
    """What an op computes, in words: "`rsqrt` of x"."""
    value = op.scalar()
    if op.name == "add" and value is not None and op.sources:
        return f"{value:g} + {'/'.join(sorted(op.sources))}"
    return f"`{op.name}` of {op.origin}"


def _upstream_variants() -> list[Variant]:
    return [
        Variant(
            text="the first element of grad_output is used for every row "
            "(incoming gradient treated as a scalar)",
            rank="index",
            upstream=lambda g: g.reshape(-1)[:1].reshape([1] * g.ndim).expand(g.shape).contiguous(),
        ),
        Variant(
            text="the first row of grad_output is used for every row",
            rank="index",
            upstream=lambda g: g[:1].expand(g.shape).contiguous() if g.ndim > 1 else g,
        ),
        Variant(
            text="grad_output is read with the strides of a contiguous tensor (its row stride is ignored)",
            rank="index",
            upstream=_as_if_contiguous,
        ),
        Variant(text="grad_output is ignored (taken as ones)", rank="formula", upstream=torch.ones_like),
    ]


def _input_variants() -> list[Variant]:
    return [
        Variant(
            text="inputs are read with the strides of a contiguous tensor (their strides are ignored)",
            rank="index",
            inputs=_as_if_contiguous,
        )
    ]


def _as_if_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """What a kernel reads that starts at the right address and assumes dense rows."""
    storage = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    flat = storage[tensor.storage_offset() :]
    if flat.numel() < tensor.numel():
        filler = torch.zeros(tensor.numel() - flat.numel(), dtype=tensor.dtype, device=tensor.device)
        flat = torch.cat((flat, filler))
    return flat[: tensor.numel()].reshape(tensor.shape).clone()


def _store_variants(trace: Trace, case: Case) -> list[Variant]:
    """Truncation toward zero at every narrowing store."""
    low = getattr(torch, case.dtype)
    stores = [
        op for op in trace.ops.values() if op.name == "_to_copy" and _narrowing(op) and op.out.dtype == low
    ]
    if not stores:
        return []
    return [
        Variant(
            text=f"results are truncated toward zero when stored as {case.dtype} "
            "instead of rounded to nearest even",
            rank="store",
            changes={op.number: _truncated for op in stores},
        )
    ]


def _narrowing(op: Op) -> bool:
    source = op.args[0].dtype
    return source.is_floating_point and torch.finfo(op.out.dtype).eps > torch.finfo(source).eps


def _truncated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> torch.Tensor:
    wide, near = args[0].to(torch.float64), out.to(torch.float64)
    toward_zero = torch.nextafter(out, torch.zeros_like(out))
    return torch.where(near.abs() > wide.abs(), toward_zero, out)


def _rounding(dtype: torch.dtype) -> Change:
    return lambda func, args, kwargs, out: out.to(dtype).to(out.dtype)


def _of_op(op: Op, trace: Trace, case: Case, tiles: tuple[int, ...]) -> Iterator[Variant]:
    where = op.side
    if (
        op.out.dtype == torch.float32
        and op.out.is_floating_point()
        and not (op.exact and op.name != "_to_copy")
    ):
        half = torch.bfloat16 if case.dtype == "bfloat16" else torch.float16
        if op.name != "_to_copy" or op.args[0].dtype == torch.float64:
            yield Variant(
                text=f"{where}{_early(op, trace)} is rounded to {str(half)[6:]} (early cast)",
                rank="cast",
                changes={op.number: _rounding(half)},
            )
            chain = _chain(op, trace)
            if len(chain) > 1 and not op.backward:
                yield Variant(
                    text=f"{_early(op, trace)} is computed in {str(half)[6:]}, "
                    "with all it is made from (early cast)",
                    rank="cast",
                    changes={number: _rounding(half) for number in chain},
                )
    if op.name in ("sum", "mean"):
        yield from of_sum(op, trace, case, tiles, where)
    if op.name in ("mm", "bmm"):
        yield from of_product(op, where)
    yield from of_mask(op, tiles)
    yield from of_scan(op, where)
    if op.name == "amax":
        yield Variant(
            text="padded lanes are loaded as 0 and take part in the row maximum (-inf is the neutral value)",
            rank="mask",
            changes={op.number: lambda f, a, k, out: out.clamp_min(0.0)},
        )
        yield Variant(
            text="the row maximum is not subtracted before exp (overflow)",
            rank="stability",
            changes={op.number: lambda f, a, k, out: torch.zeros_like(out)},
        )
    if op.name in ("rsqrt", "sqrt"):
        yield from _of_root(op, trace)
    if op.name == "arange" and op.out.numel() > 1:
        yield from (
            Variant(text=f"positions are off by {by:+d}", rank="index", changes={op.number: _moved_by(by)})
            for by in (1, -1)
        )
    yield from _skipped(op, trace, where)
    if op.name in ("exp", "log", "gelu", "tanh", "sigmoid"):
        yield from _approximated(op)


def _moved_by(shift: int) -> Change:
    return lambda func, args, kwargs, out: out + shift


def _chain(op: Op, trace: Trace) -> list[int]:
    """`op` and the arithmetic before it, back to the inputs, as far as it works in FP32."""
    found: list[int] = []
    waiting = [op.number]
    while waiting:
        maker = trace.ops.get(waiting.pop())
        if maker is None or maker.number in found or maker.out.dtype != torch.float32:
            continue
        if maker.name == "_to_copy" and maker.args[0].dtype != torch.float64:
            continue
        if not maker.exact or maker.name == "_to_copy":
            found.append(maker.number)
        waiting += [number for number in maker.makers if number]
    return sorted(found)


def _early(op: Op, trace: Trace) -> str:
    """Names the rounded value; an angle, a reciprocal root or a gain by its own name."""
    readers = trace.readers(op.number)
    if any(r.name in ("sin", "cos") for r in readers):
        return f"the angle before sin and cos ({subject(op)})"
    if op.name == "rsqrt":
        return f"the reciprocal root, rstd ({subject(op)})"
    return subject(op)


def _of_root(op: Op, trace: Trace) -> Iterator[Variant]:
    maker = trace.ops.get(op.makers[0]) if op.makers else None
    eps = maker.scalar() if maker is not None and maker.name == "add" else None
    if maker is None or eps is None or not 0 < eps < 0.1:
        return

    def outside(func: Any, args: Any, kwargs: Any, out: torch.Tensor) -> torch.Tensor:
        root: torch.Tensor = (args[0] - eps).clamp_min(0).sqrt() + eps
        return root.reciprocal() if func is torch.ops.aten.rsqrt.default else root

    def other(value: float) -> Change:
        return lambda func, args, kwargs, out: func(args[0] - eps + value)

    yield Variant(
        text=f"epsilon is added outside the square root: 1 / (sqrt(ms) + {eps:g}) "
        f"in place of 1 / sqrt(ms + {eps:g})",
        rank="formula",
        changes={op.number: outside},
    )
    yield Variant(text=f"epsilon ({eps:g}) is left out", rank="formula", changes={op.number: other(0.0)})
    for value in (1e-8, 1e-6, 1e-5, 1e-3):
        if value != eps:
            yield Variant(
                text=f"epsilon is {value:g} where {eps:g} was passed",
                rank="formula",
                changes={op.number: other(value)},
            )


def _skipped(op: Op, trace: Trace, where: str) -> Iterator[Variant]:
    """The op left out, everywhere or in the backward only."""
    if op.name not in ("add", "mul", "sub", "div", "where", "neg", "tanh", "sigmoid", "clamp"):
        return
    operands = [a for a in op.args if isinstance(a, torch.Tensor) and a.is_floating_point()]
    for place, operand in enumerate(operands[:2]):
        if operand.shape != op.out.shape and operand.numel() != op.out.numel():
            continue
        others = [a for a in op.args if a is not operand]
        what = _term(others, op, place)
        through = _through(op, place, trace)
        if op.backward and op.name == "add" and _is_upstream(others, op, trace):
            what = "the residual gradient (the path of grad_output around the formula)"
        elif through:
            what = through
        position = op.args.index(operand) if operand is op.args[0] else 1
        yield Variant(
            text=f"{where}{what} is missing: {_derivative(op, operand, trace)}{subject(op)}",
            rank="formula",
            changes={op.number: _only(position)},
        )
        if (
            not op.backward
            and op.name in ("add", "mul", "sub")
            and operand is op.args[0]
            and any(reader.backward for reader in trace.readers(op.number))
        ):
            yield Variant(
                text=f"the gradient formula uses {'/'.join(sorted(op.sources))} where it needs {subject(op)}",
                rank="formula",
                swaps={op.number: lambda args, out: args[0]},
            )


def _derivative(op: Op, kept: torch.Tensor, trace: Trace) -> str:
    """What the missing factor of a backward product is the derivative of, where that shows."""
    if not op.backward or op.name != "mul":
        return ""
    waiting = [
        number
        for operand, number in zip(
            (a for a in op.args if isinstance(a, torch.Tensor)), op.makers, strict=False
        )
        if operand is not kept
    ]
    for _ in range(4):
        makers = [trace.ops[number] for number in waiting if number in trace.ops]
        for maker in makers:
            if not maker.backward and maker.name in _HAVE_DERIVATIVES:
                return f"the derivative of `{maker.name}`, "
        waiting = [number for maker in makers if maker.backward for number in maker.makers]
    return ""


def _through(op: Op, kept: int, trace: Trace) -> str:
    """Which forward step's share of the gradient is lost with an operand of a backward sum or mask."""
    if not op.backward:
        return ""
    if op.name == "where":
        return f"the derivative of `{op.node}` (its mask)" if op.node else ""
    if op.name != "add" or len(op.makers) < 2:
        return ""
    # Gradients of one tensor are added as they arrive: the second operand is that of the step running now.
    maker = trace.ops.get(op.makers[0])
    lost = op.node if kept == 0 else (maker.node if maker is not None else "")
    return f"the gradient through `{lost}`" if lost else ""


def _is_upstream(others: list[Any], op: Op, trace: Trace) -> bool:
    """Whether the operand left out is grad_output itself, moved or cast at most."""
    addresses = [o.untyped_storage().data_ptr() for o in others if isinstance(o, torch.Tensor)]
    tensors = [a for a in op.args if isinstance(a, torch.Tensor)]
    for tensor, number in zip(tensors, op.makers, strict=False):
        maker = trace.ops.get(number)
        if tensor.untyped_storage().data_ptr() not in addresses or maker is None:
            continue
        if maker.exact and maker.sources == {"grad_output"}:
            return True
    return False


def _term(others: list[Any], op: Op, place: int) -> str:
    scalars = [o for o in others if isinstance(o, int | float) and not isinstance(o, bool)]
    word = {"add": "the term", "mul": "the factor", "sub": "the term", "div": "the divisor"}.get(
        op.name, "the step"
    )
    return f"{word} {scalars[0]:g}" if scalars else f"{word} beside operand {place + 1}"


def _only(position: int) -> Change:
    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> torch.Tensor:
        operand: torch.Tensor = args[position]
        return operand.to(out.dtype).expand(out.shape).clone()

    return change


def _approximated(op: Op) -> Iterator[Variant]:
    if op.name == "exp":
        yield Variant(
            text="exp2 stands where exp is meant (base 2 for base e)",
            rank="formula",
            changes={op.number: lambda f, a, k, out: torch.exp2(a[0])},
        )
    if op.name == "log":
        yield Variant(
            text="log2 stands where the natural log is meant (base 2 for base e)",
            rank="formula",
            changes={op.number: lambda f, a, k, out: torch.log2(a[0])},
        )
    if op.name in ("tanh", "sigmoid") and not op.backward:
        yield Variant(
            text=f"`{op.name}` is a quotient of exponentials that overflow for large inputs (Inf / Inf)",
            rank="stability",
            changes={op.number: _quotient},
        )
    if op.name == "gelu":
        yield Variant(
            text="GELU by tanh where erf is meant, or the other way round",
            rank="approximation",
            changes={op.number: _other_gelu},
        )


def _quotient(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> torch.Tensor:
    tanh = func is torch.ops.aten.tanh.default
    e = torch.exp(args[0] * 2 if tanh else args[0])
    return (e - 1 if tanh else e) / (e + 1)


def _other_gelu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> torch.Tensor:
    now = kwargs.get("approximate", "none")
    return torch.nn.functional.gelu(args[0], approximate="none" if now == "tanh" else "tanh")
