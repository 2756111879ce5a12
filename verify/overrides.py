"""Pairs of calls that the user names, from a CSV file. Loads no torch."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path

from bridge.capture.record import Call
from bridge.errors import UsageError, near_misses


def read_overrides(path: Path) -> dict[str, str]:
    """Read `key_a,key_b` lines (CSV; blank lines, # comments and a header are skipped).

    Raises UsageError naming the line that has another form.
    """
    pairs: dict[str, str] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--overrides needs a readable CSV file, got {path}: {error}") from None
    for number, row in enumerate(csv.reader(lines), start=1):
        cells = [cell.strip() for cell in row]
        if not any(cells) or cells[0].startswith("#"):
            continue
        if len(cells) != 2 or not all(cells):
            line = ",".join(row)
            raise UsageError(f"--overrides needs lines `key_a,key_b`, got {line!r} in {path}:{number}")
        if not pairs and not any("/" in cell for cell in cells):
            continue
        if cells[0] in pairs or cells[1] in pairs.values():
            line = ",".join(cells)
            raise UsageError(
                f"--overrides may name a key once, got {line!r} again in {path}:{number}; keep one"
            )
        pairs[cells[0]] = cells[1]
    return pairs


def override_places(
    overrides: Mapping[str, str], a: Iterable[Call], b: Iterable[Call]
) -> list[tuple[int, int]]:
    """Positions of the calls of two runs that overrides pair, by key of A and of B, in order.

    Raises:
        UsageError: a key that its run does not have.
    """
    if not overrides:
        return []
    keys = {"A": [call.key for call in a], "B": [call.key for call in b]}
    found: list[tuple[int, int]] = []
    for names in overrides.items():
        places = []
        for (side, own), name in zip(keys.items(), names, strict=True):
            at = [position for position, key in enumerate(own) if key == name]
            if not at:
                hint = near_misses(name, own[:20000])
                raise UsageError(f"--overrides names {name!r}, which run {side} does not have; {hint}")
            places.append(at)
        found += zip(*places, strict=False)
    return found
