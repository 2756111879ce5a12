"""How a child of `bridge ab` answers: a JSON file, or one line on stderr and the exit code of the error."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from bridge.errors import BridgeError


def answer(out: str, make: Callable[[], object]) -> int:
    """Write what `make` gives to `out`, and return the exit code."""
    try:
        found = make()
    except BridgeError as error:
        print(f"bridge: error: {error}", file=sys.stderr)
        return error.exit_code
    Path(out).write_bytes(msgspec.json.encode(found))
    return 0
