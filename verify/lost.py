"""Cases that took their process along or hung in it: when to give up, and in which words. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from bridge.verify.request import Lost

#: A kernel that crashes everywhere is not worth a process per case.
MAX_LOST = 4
#: Nor one that hangs a wait of --timeout per case.
MAX_HUNG = 2


def last_that_counts(lost: Sequence[Lost]) -> int | None:
    """Number of the case at which the kernel had crashed too often, in the order of the cases; None: not yet.

    Whoever judges in order stops there, so what lies beyond does not count for several processes either.
    """
    numbers = sorted(item.number for item in lost)
    return numbers[MAX_LOST - 1] if len(numbers) >= MAX_LOST else None


def gives_up(lost: Sequence[Lost]) -> bool:
    """Whether no further case is judged, whatever its number: time counts more than order."""
    return sum(item.hung for item in lost) >= MAX_HUNG or len(lost) >= 2 * MAX_LOST


def not_judged(lost: Sequence[Lost], count: int) -> str:
    """What became of the `count` cases that were never tried, in words."""
    cases = f"{count} case{'s' if count > 1 else ''}"
    hung = [item.case for item in lost if item.hung]
    if len(hung) >= MAX_HUNG:
        return f"{cases} not judged: the kernel hung in {' and in '.join(hung)}"
    return f"{cases} not judged: the kernel had crashed on {len(lost)}"
