"""Wrong variants of running sums and of sums that are scattered into a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bridge.verify.trace import Op
from bridge.verify.variant import Variant

#: Rows that a scatter is replayed over, one after the other.
_MOST_ROWS = 2048


def of_scan(op: Op, where: str) -> Iterator[Variant]:
    """Faults of one running or scattered sum."""
    of = ", ".join(sorted(op.sources))
    if op.name == "cumsum":
        axis = int(op.args[1])
        yield Variant(
            text=f"{where}the running sum of {of} is exclusive where it must include its own term",
            rank="index",
            changes={op.number: lambda f, a, k, out: out - a[0].to(out.dtype)},
        )
        yield Variant(
            text=f"{where}the running sum of {of} runs in the other direction",
            rank="index",
            changes={op.number: lambda f, a, k, out: f(a[0].flip(axis), axis).flip(axis)},
        )
    if op.name == "embedding_dense_backward" and op.args[0].numel() and op.args[1].numel() <= _MOST_ROWS:
        for dtype in (torch.float16, torch.bfloat16):
            yield Variant(
                text=f"{where}rows of {of} are scattered into a table of {str(dtype)[6:]}, "
                "which rounds at every addition",
                rank="accumulator",
                changes={op.number: _scattered(dtype)},
                noise=True,
            )


def _scattered(dtype: torch.dtype) -> Any:
    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> torch.Tensor:
        rows = args[0].reshape(-1, args[0].shape[-1]).to(dtype)
        table = torch.zeros(out.shape, dtype=dtype, device=out.device)
        for row, place in enumerate(args[1].reshape(-1).tolist()):
            table[place] += rows[row]
        return table.to(out.dtype)

    return change
