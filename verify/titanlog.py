"""Makes torchtitan's activation logs comparable with each other and with captures. Loads no torch.

A log has L1 and L2 norm, min, max and mean of the first output, L1 norms of all inputs and outputs, the
producers' keys, phase and source line: no bit-exact hash, no shapes of inputs, seven digits. A comparison
with a log is only as fine as that. `capture.titan_log` reads them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bridge.capture.record import Call, Phase
from bridge.capture.titan_log import is_titan_log, read_titan_logs
from bridge.errors import CaptureError
from bridge.verify.columns import short_op

#: The logger roots some module names at the model's class.
_CLASS = re.compile(r"^[A-Z][A-Za-z0-9_]*(?:\.|$)")


def is_log(path: Path) -> bool:
    """Whether a path is an activation log or a folder of them."""
    return is_titan_log(path)


def read_log(path: Path) -> list[Call]:
    """Read one log, or every rank's log of a folder; ops and modules by the names that captures have.

    Raises:
        CaptureError: a file that cannot be read, is damaged, or holds no call.
    """
    try:
        calls = [_as_aligned(call) for call in read_titan_logs(path)]
    except OSError as error:
        raise CaptureError(f"{path} must be a readable activation log: {error.strerror}") from None
    if not calls:
        raise CaptureError(f"{path} holds no call of an activation log; wanted blocks [module/op_N_name]")
    return calls


def as_log(calls: Sequence[Call]) -> list[Call]:
    """Calls of a capture as the logger would have named them: ops only, by their short names."""
    return [
        msgspec.structs.replace(call, op=short_op(call.op), phase=_log_phase(call.phase))
        for call in calls
        if call.kind == "op"
    ]


def _log_phase(phase: Phase) -> Phase:
    # The logger knows two phases: whatever runs under autograd's engine is backward.
    return "backward" if phase in ("backward", "recompute") else "forward"


def _as_aligned(call: Call) -> Call:
    # The names that calls of captures are aligned by.
    return msgspec.structs.replace(call, op=short_op(call.op), module=_CLASS.sub("", call.module), flags={})
