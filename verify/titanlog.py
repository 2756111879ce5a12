"""Makes torchtitan's activation logs comparable with each other and with captures. Loads no torch.

A log has L1 and L2 norm, min, max and mean of the first output, L1 norms of all inputs and outputs, the
producers' keys, phase and source line: no bit-exact hash, no shapes of inputs, seven digits. A comparison
with a log is only as fine as that. The parser is `capture.titan_log`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bridge.capture.record import Call, Digest, Phase, TensorRecord
from bridge.capture.titan_log import is_titan_log, read_titan_log, titan_logs
from bridge.errors import CaptureError
from bridge.verify.columns import short_op

#: The logger roots some module names at the model's class.
_CLASS = re.compile(r"^[A-Z][A-Za-z0-9_]*(?:\.|$)")


def is_log(path: Path) -> bool:
    """Whether a path is an activation log or a folder of them."""
    return is_titan_log(path)


def read_log(path: Path) -> list[Call]:
    """Read one log, or every rank's log of a folder, with a digest for every norm that it has.

    Raises:
        CaptureError: a file that cannot be read, is damaged, or holds no call.
    """
    calls: list[Call] = []
    for file in titan_logs(path):
        try:
            calls.extend(_with_norms(call) for call in read_titan_log(file))
        except OSError as error:
            raise CaptureError(f"{file} must be a readable activation log: {error.strerror}") from None
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


def _with_norms(call: Call) -> Call:
    inputs = [
        msgspec.structs.replace(record, digest=_norm_only(norm))
        for record, norm in zip(
            call.inputs, _norms(call.flags.get("input_l1"), len(call.inputs)), strict=True
        )
    ]
    outputs = list(call.outputs)
    for place, norm in enumerate(_norms(call.flags.get("output_l1"), None)):
        if place >= len(outputs):
            outputs.append(TensorRecord(name=str(place), dtype="", shape=(), digest=_norm_only(norm)))
    return msgspec.structs.replace(
        call,
        op=short_op(call.op),
        module=_CLASS.sub("", call.module),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        flags={},
    )


def _norms(values: Any, count: int | None) -> list[float]:
    norms = [float(value) for value in values or ()]
    if count is None:
        return norms
    return (norms + [math.nan] * count)[:count]


def _norm_only(norm: float) -> Digest | None:
    """A digest of which only sum|x| is known; None where not even that is."""
    if math.isnan(norm):
        return None
    nan = math.nan
    return Digest(
        count=0, sum=nan, abs_sum=norm, sq_sum=nan, min=None, max=None, nan=0, pos_inf=0, neg_inf=0, hash=""
    )
