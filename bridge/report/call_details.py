"""Drill-down of single calls for the page: labelled lines, tables and figures, per row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bridge.report.diff_model import attribution_facts, difference
from bridge.report.error_figures import difference_histogram, error_map
from bridge.report.figures import Figure
from bridge.report.numbers import precise, short
from bridge.verify.diff_document import CallDetail, TensorDiff

#: Map blocks that one page may hold: about 6 bytes each once packed.
MAX_BLOCKS = 200_000

_TENSORS = (
    "Tensor",
    "Dtype",
    "Shape",
    "Difference",
    "Noise",
    "max|a-b|",
    "Worst rel",
    "Worst ULP",
    "Bias ULP",
    "Differ",
)
_STATISTICS = ("Tensor", "Side", "Mean", "RMS", "Min", "Max", "NaN", "Inf", "Hash")


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """How the two sides of a drill-down, and the limit between them, are called."""

    a: str = "A"
    b: str = "B"
    limit: str = "noise floor"
    arguments: str = "Arguments that differ"


def call_details(
    details: Sequence[CallDetail], words: Words = Words()
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the blocks of every row that has a drill-down, by row, and the figures they name."""
    figures: dict[str, dict[str, Any]] = {}
    budget = MAX_BLOCKS
    found: dict[str, Any] = {}
    for detail in details:
        blocks = list(_blocks(detail, words))
        for i, tensor in enumerate(detail.tensors):
            for kind, figure, cost in _figures(tensor, words):
                if cost > budget:
                    left_out = "left out to keep the page small; the JSON document has it"
                    blocks.append(_facts("", [("Map", left_out)]))
                    continue
                budget -= cost
                name = f"{kind}-{detail.row}-{i}"
                figures[name] = figure.spec
                title = f"{_tensor_name(tensor)}: {figure.title}"
                blocks.append({"kind": "figure", "title": title, "name": name, "summary": figure.summary})
            if tensor.worst:
                blocks.append(_worst(tensor, words))
        found[str(detail.row)] = blocks
    return found, figures


def _blocks(detail: CallDetail, words: Words) -> Iterator[dict[str, Any]]:
    facts = [("Matched", detail.how_matched), *attribution_facts(detail.attribution)]
    if detail.producers_a == detail.producers_b:
        facts.append(("Inputs from", ", ".join(detail.producers_a)))
    else:
        facts += [
            ("Inputs from, A", ", ".join(detail.producers_a)),
            ("Inputs from, B", ", ".join(detail.producers_b)),
        ]
    yield _facts("", [(label, text) for label, text in facts if text])
    if detail.arguments:
        same = all(a == b for a, b in detail.arguments.values())
        rows = [[name, a] if same else [name, a, b] for name, (a, b) in detail.arguments.items()]
        sides = ("Value",) if same else (words.a, words.b)
        yield _table(words.arguments, ("Argument", *sides), rows)
    if detail.tensors:
        head = tuple(words.limit.capitalize() if name == "Noise" else name for name in _TENSORS)
        yield _table("Tensors", head, [_tensor_cells(tensor) for tensor in detail.tensors])
        statistics = [line for tensor in detail.tensors for line in _statistics(tensor, words)]
        if statistics:
            yield _table("Statistics of both sides", _STATISTICS, statistics)


def _facts(title: str, items: list[tuple[str, str]]) -> dict[str, Any]:
    return {"kind": "facts", "title": title, "items": items}


def _table(title: str, head: tuple[str, ...], rows: list[list[str]]) -> dict[str, Any]:
    return {"kind": "table", "title": title, "head": head, "rows": rows}


def _tensor_name(tensor: TensorDiff) -> str:
    names = tensor.name_a if tensor.name_a == tensor.name_b else f"{tensor.name_a} / {tensor.name_b}"
    return f"{tensor.role} {names}".replace("_", " ")


def _both(a: str, b: str) -> str:
    return a if a == b or not b else b if not a else f"{a} / {b}"


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _tensor_cells(tensor: TensorDiff) -> list[str]:
    name = _tensor_name(tensor) + (f" ({tensor.note})" if tensor.note else "")
    size = "bit-equal" if tensor.equal else difference(tensor.difference)
    if not tensor.elementwise and not tensor.equal and tensor.difference is not None:
        size += " (from digests)"
    return [
        name,
        _both(tensor.dtype_a, tensor.dtype_b),
        _both(_shape(tensor.shape_a), _shape(tensor.shape_b)) if tensor.dtype_a else _shape(tensor.shape_b),
        size,
        short(tensor.noise),
        short(tensor.max_abs),
        short(tensor.max_rel),
        short(tensor.ulp),
        short(tensor.bias_ulp),
        "-" if tensor.different is None else f"{tensor.different:,}",
    ]


def _statistics(tensor: TensorDiff, words: Words) -> Iterator[list[str]]:
    for side, digest in ((words.a, tensor.digest_a), (words.b, tensor.digest_b)):
        if digest is None:
            continue
        finite = digest.count - digest.nan - digest.pos_inf - digest.neg_inf
        yield [
            _tensor_name(tensor),
            side,
            short(digest.sum / finite if finite else None),
            short((digest.sq_sum / finite) ** 0.5 if finite else None),
            short(digest.min),
            short(digest.max),
            f"{digest.nan:,}",
            f"{digest.pos_inf + digest.neg_inf:,}",
            digest.hash,
        ]


def _figures(tensor: TensorDiff, words: Words) -> Iterator[tuple[str, Figure, int]]:
    if tensor.error_map is not None:
        source = tensor.error_map
        yield "map", error_map(source, limit=words.limit), sum(map(len, source.values))
    if tensor.histogram is not None:
        yield "histogram", difference_histogram(tensor.histogram, words.b, words.a), 0


def _worst(tensor: TensorDiff, words: Words) -> dict[str, Any]:
    rows = [
        ["[" + ", ".join(map(str, item.index)) + "]", precise(item.a), precise(item.b), short(item.ulp)]
        for item in tensor.worst
    ]
    return _table(f"{_tensor_name(tensor)}: worst elements", ("Element", words.a, words.b, "ULP"), rows)
