"""Wrong variants of whole torch functions: another option, or the textbook formula for the stable one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bridge.verify.case import Case
from bridge.verify.spec import KernelSpec
from bridge.verify.variant import Variant

F = torch.nn.functional
#: Guards that textbook formulas put under a logarithm.
_GUARDS = (0.0, 1e-12, 1e-10, 1e-8, 1e-7, 1e-6)
#: Options that are easily taken for their opposite: name -> (position, default).
_OPTIONS: dict[str, tuple[tuple[str, int, Any], ...]] = {
    "avg_pool1d": (("ceil_mode", 4, False), ("count_include_pad", 5, True)),
    "avg_pool2d": (("ceil_mode", 4, False), ("count_include_pad", 5, True)),
    "kl_div": (("log_target", 5, False),),
    "var": (("unbiased", 2, True),),
    "std": (("unbiased", 2, True),),
}
_REDUCTIONS = ("kl_div", "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
               "binary_cross_entropy", "binary_cross_entropy_with_logits")  # fmt: skip


#: What is called or not by whether gradients are wanted; the places of the others must not move with it.
_UNCOUNTED = (torch.is_grad_enabled, torch._C._set_grad_enabled)


class _Calls(TorchFunctionMode):
    """Notes every torch function called, or puts another in the place of one of them."""

    def __init__(self, number: int = -1, other: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._number, self._other = number, other

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _UNCOUNTED:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        place = len(self.seen)
        self.seen.append((name, args, kwargs))
        if place == self._number and self._other is not None:
            return self._other(func, *args, **kwargs)
        return func(*args, **kwargs)


def of_calls(spec: KernelSpec, case: Case) -> Iterator[Variant]:
    """Faults of the torch functions that the reference calls on one case."""
    calls, inputs = _Calls(), tuple(t.detach() for t in case.inputs)
    try:
        with torch.no_grad(), calls:
            spec.reference(*inputs, **case.attrs)
    except Exception:  # the reference ran under other modes before; without them it has no variants here
        return
    for number, (name, args, kwargs) in enumerate(calls.seen):
        for text, rank, other in _others(name, args, kwargs):
            yield Variant(text=text, rank=rank, function=_with(spec, number, other))


def _with(spec: KernelSpec, number: int, other: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(spec.reference)
    def reference(*inputs: torch.Tensor, **attrs: Any) -> Any:
        with _Calls(number, other):
            return spec.reference(*inputs, **attrs)

    return reference


_Other = tuple[str, str, Callable[..., Any]]


def _others(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[_Other]:
    for option, position, default in _OPTIONS.get(name, ()):
        value = args[position] if len(args) > position else kwargs.get(option, default)
        if isinstance(value, bool):
            yield _flipped(name, option, position, value)
    if name in ("var", "std") and "correction" in kwargs:
        yield (
            f"`{name}` divides by N where N - {kwargs['correction']:g} is meant, or the other way round",
            "formula",
            lambda f, *a, **k: f(*a, **{**k, "correction": 0 if k["correction"] else 1}),
        )
    if name in _REDUCTIONS:
        yield from _reduced(name, kwargs)
    yield from _unstable(name)


def _flipped(name: str, option: str, position: int, value: bool) -> _Other:
    def other(func: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) > position:
            args = (*args[:position], not value, *args[position + 1 :])
            return func(*args, **kwargs)
        return func(*args, **{**kwargs, option: not value})

    words = {
        (
            "count_include_pad",
            True,
        ): "border windows of `{}` are divided by the real elements, not by the full window",
        (
            "count_include_pad",
            False,
        ): "border windows of `{}` are divided by the full window: padding is counted in",
    }.get((option, value), f"`{{}}` has {option}={not value} where {value} is meant")
    return words.format(name), "formula", other


def _reduced(name: str, kwargs: dict[str, Any]) -> Iterator[_Other]:
    given = kwargs.get("reduction", "mean")
    others = {"mean": ("sum", "batchmean"), "batchmean": ("mean", "sum"), "sum": ("mean",)}.get(given, ())
    for reduction in others:
        if reduction == "batchmean" and name != "kl_div":
            continue
        yield (
            f"`{name}` has reduction={reduction!r} where {given!r} is meant",
            "formula",
            lambda f, *a, r=reduction, **k: f(*a, **{**k, "reduction": r}),
        )


def _unstable(name: str) -> Iterator[_Other]:
    if name in ("softplus", "log1p", "expm1"):
        words, other = {
            "softplus": ("log(1 + exp(x))", _softplus),
            "log1p": ("log(1 + x)", lambda f, x: torch.log(1.0 + x)),
            "expm1": ("exp(x) - 1", lambda f, x: torch.exp(x) - 1.0),
        }[name]
        yield f"`{name}` is computed as {words}: small results cancel", "stability", other
    for guard in _GUARDS:
        plus = f" + {guard:g}" if guard else ""
        if name == "binary_cross_entropy_with_logits":
            yield (
                f"`{name}` is computed from the rounded sigmoid, log(sigmoid(x){plus}): it saturates where "
                "the sigmoid rounds to 0 or 1",
                "stability",
                functools.partial(_bce, guard=guard),
            )
        if name == "logsigmoid":
            yield (
                f"`{name}` is computed as log(sigmoid(x){plus}): it saturates for very negative x",
                "stability",
                lambda f, x, g=guard: torch.log(torch.sigmoid(x) + g),
            )
        if name == "log_softmax":
            yield (
                f"`{name}` is computed as log(softmax(x){plus}): small probabilities are lost",
                "stability",
                functools.partial(_log_softmax, guard=guard),
            )
    if name == "normalize":
        yield "`normalize` adds eps to the norm where the larger of the two is meant", "formula", _normalize
    if name in ("topk", "sort"):
        yield (
            f"equal values are lost in `{name}`: what was found is masked out by value, not by position",
            "index",
            _without_ties,
        )


def _softplus(func: Any, x: torch.Tensor, beta: float = 1.0, threshold: float = 20.0) -> torch.Tensor:
    small = torch.log(1.0 + torch.exp((x * beta).clamp(max=threshold))) / beta
    return torch.where(x * beta > threshold, x, small)


def _bce(
    func: Any, x: torch.Tensor, t: torch.Tensor, *args: Any, guard: float, **kwargs: Any
) -> torch.Tensor:
    s = torch.sigmoid(x)
    loss = -(t * torch.log(s + guard) + (1.0 - t) * torch.log(1.0 - s + guard))
    reduction = kwargs.get("reduction", "mean")
    return loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.mean()


def _log_softmax(
    func: Any, x: torch.Tensor, dim: int = -1, *args: Any, guard: float, **kwargs: Any
) -> torch.Tensor:
    return torch.log(torch.softmax(x, dim, **{k: v for k, v in kwargs.items() if k == "dtype"}) + guard)


def _normalize(
    func: Any, x: torch.Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, **_: Any
) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(x, p, dim, keepdim=True)
    return x / (norm + eps)


def _without_ties(func: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """The same choice among values of which each row holds every one but once."""
    dim = int(kwargs.get("dim", args[1] if len(args) > 1 else -1))
    ranked, order = torch.sort(x, dim=dim, stable=True)
    same = torch.zeros_like(ranked, dtype=torch.bool)
    length = x.shape[dim]
    same.narrow(dim, 1, length - 1).copy_(
        ranked.narrow(dim, 1, length - 1) == ranked.narrow(dim, 0, length - 1)
    )
    lost = torch.zeros_like(same).scatter(dim, order, same)
    return func(x.masked_fill(lost, -float("inf")), *args, **kwargs)
