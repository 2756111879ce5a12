"""Where the error sits: rows, columns, edges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bridge.verify.local import as_matrix


def where_it_sits(failing: Sequence[Any]) -> str:
    """One sentence on the first failing tensor: which rows and columns are over their noise."""
    for e in failing:
        for t in e.tensors:
            if t.verdict != "FAIL":
                continue
            got, want = e.target.named().get(t.tensor), e.golden.named().get(t.tensor)
            if (
                got is None
                or want is None
                or got.shape != want.shape
                or got.device != want.device
                or not got.is_floating_point()
                or not got.numel()
            ):
                continue
            error = (got.to(torch.float64) - want).abs()
            error = torch.where(torch.isnan(error), torch.full_like(error, float("inf")), error)
            wrong = as_matrix(error > 4.0 * e.scale(t.tensor))
            return f"{t.tensor} on {e.case.name}: {_describe(wrong)}"
    return ""


def _describe(wrong: torch.Tensor) -> str:
    rows, cols = wrong.shape
    share = float(wrong.double().mean())
    if share == 0:
        return "spread thinly: no single element stands out"
    if share > 0.6:
        return "everywhere"
    bad_rows, bad_cols = wrong.any(1).nonzero().flatten(), wrong.any(0).nonzero().flatten()
    parts = [_lines(bad_rows, rows, "row"), _lines(bad_cols, cols, "column")]
    return f"{share:.1%} of elements: " + ", ".join(p for p in parts if p)


def _lines(bad: torch.Tensor, total: int, word: str) -> str:
    count = int(bad.numel())
    if total == 1 or count == 0:
        return ""
    if count == total:
        return f"all {word}s"
    first, last = int(bad[0]), int(bad[-1])
    if count == 1:
        edge = " (the last)" if first == total - 1 else (" (the first)" if first == 0 else "")
        return f"{word} {first}{edge} of {total}"
    if last - first + 1 == count:
        edge = ", the tail" if last == total - 1 else (", the head" if first == 0 else "")
        return f"{word}s {first} to {last}{edge} of {total}"
    return f"{count} of {total} {word}s"
