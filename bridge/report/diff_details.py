"""Drill-down of single calls for the page: labelled lines, tables and figures, per row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bridge.report.diff_model import attribution_facts, difference
from bridge.report.error_figures import difference_histogram, error_map
from bridge.report.figures import Figure
from bridge.report.numbers import short
from bridge.verify.diff_document import CallDetail, DiffDocument, TensorDiff

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


def diff_details(document: DiffDocument) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the blocks of every row that has a drill-down, by row, and the figures they name."""
    figures: dict[str, dict[str, Any]] = {}
    budget = MAX_BLOCKS
    found: dict[str, Any] = {}
    for detail in document.details:
        blocks = list(_blocks(detail))
        for i, tensor in enumerate(detail.tensors):
            for kind, figure, cost in _figures(tensor):
                if cost > budget:
                    blocks.append(_facts("", [("Map", "left out to keep the page small; diff.json has it")]))
                    continue
                budget -= cost
                name = f"{kind}-{detail.row}-{i}"
                figures[name] = figure.spec
                title = f"{_tensor_name(tensor)}: {figure.title}"
                blocks.append({"kind": "figure", "title": title, "name": name, "summary": figure.summary})
            if tensor.worst:
                blocks.append(_worst(tensor))
        found[str(detail.row)] = blocks
    return found, figures


def _blocks(detail: CallDetail) -> Iterator[dict[str, Any]]:
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
        rows = [[name, a, b] for name, (a, b) in detail.arguments.items()]
        yield _table("Arguments that differ", ("Argument", "A", "B"), rows)
    if detail.tensors:
        yield _table("Tensors", _TENSORS, [_tensor_cells(tensor) for tensor in detail.tensors])
        statistics = [line for tensor in detail.tensors for line in _statistics(tensor)]
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
        _both(_shape(tensor.shape_a), _shape(tensor.shape_b)),
        size,
        short(tensor.noise),
        short(tensor.max_abs),
        short(tensor.max_rel),
        short(tensor.ulp),
        short(tensor.bias_ulp),
        "-" if tensor.different is None else f"{tensor.different:,}",
    ]


def _statistics(tensor: TensorDiff) -> Iterator[list[str]]:
    for side, digest in (("A", tensor.digest_a), ("B", tensor.digest_b)):
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


def _figures(tensor: TensorDiff) -> Iterator[tuple[str, Figure, int]]:
    if tensor.error_map is not None:
        source = tensor.error_map
        yield "map", error_map(source, limit="noise floor"), sum(map(len, source.values))
    if tensor.histogram is not None:
        yield "histogram", difference_histogram(tensor.histogram), 0


def _worst(tensor: TensorDiff) -> dict[str, Any]:
    rows = [
        ["[" + ", ".join(map(str, item.index)) + "]", short(item.a), short(item.b), short(item.ulp)]
        for item in tensor.worst
    ]
    return _table(f"{_tensor_name(tensor)}: worst elements", ("Element", "A", "B", "ULP"), rows)
