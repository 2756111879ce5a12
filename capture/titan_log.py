"""Read the text logs of torchtitan's own activation tracer, so that old runs can still be looked at.

Such a log (`rank_0_activations.log`) has one block a call: a key in brackets, then lines of
"Name: value". It holds statistics of the first output, L1 norms of inputs and outputs, and no
tensors. Imports no torch.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from bridge.capture.record import Call, Digest, Phase, TensorRecord
from bridge.errors import CorruptCaptureError, NotACaptureError

_HEADER = re.compile(r"Total captured activations: (\d+)")
_KEY = re.compile(r"\[(?P<module>.*)/op_(?P<number>\d+)_(?P<op>[^/\]]+)\]")
_FIELD = re.compile(r"  (?P<name>[A-Z][A-Za-z0-9 ]*): (?P<value>.*)")
_SHAPE = re.compile(r"torch\.Size\(\[(?P<sizes>[0-9, ]*)\]\), Dtype: torch\.(?P<dtype>\w+)")
_NAME = re.compile(r"rank_(\d+)_activations\.log")


def is_titan_log(path: Path) -> bool:
    """Whether `path` is such a log, or a folder that holds some."""
    if path.is_dir():
        return any(_NAME.fullmatch(entry.name) for entry in path.iterdir())
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(64).startswith(b"Total captured activations: ")


def titan_logs(path: Path) -> list[Path]:
    """The log files that `path` stands for, by rank."""
    if path.is_file():
        return [path]
    found = [(int(match[1]), entry) for entry in path.iterdir() if (match := _NAME.fullmatch(entry.name))]
    return [entry for _, entry in sorted(found)]


def read_titan_logs(path: Path) -> list[Call]:
    """The calls of one log, or of every rank's log of a folder; as `read_titan_log`."""
    return [call for log in titan_logs(path) for call in read_titan_log(log)]


def read_titan_log(path: Path) -> list[Call]:
    """The calls of one log file, in order.

    A digest has what the log has. Of the first output that is all but the hash and the numbers of infinities
    and NaN; of inputs and further outputs it is the L1 norm alone (`abs_sum`, the rest NaN or None), of
    which no shape or type is known. The norms stand in `flags` as well, as the log has them.

    Raises:
        NotACaptureError: The file is no such log.
        CorruptCaptureError: It is one, but cut off or damaged.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    header = _HEADER.fullmatch(lines[0]) if lines else None
    if header is None:
        raise NotACaptureError(
            f'{path} is no activation log: its first line must be "Total captured activations: N"'
        )
    match = _NAME.fullmatch(path.name)
    rank = int(match[1]) if match else 0
    calls: list[Call] = []
    indices: dict[str, int] = {}
    for number, key, fields in _blocks(lines, path):
        parts = _KEY.fullmatch(key)
        if parts is None:
            raise CorruptCaptureError(f"{path}:{number}: expected [module/op_N_name], got {key!r}")
        call = _call(key[1:-1], parts, fields, index=len(calls), rank=rank, producers=indices)
        indices[call.key] = call.index
        calls.append(call)
    if len(calls) != int(header[1]):
        raise CorruptCaptureError(
            f"{path} announces {header[1]} calls and holds {len(calls)}; it was cut off while being written"
        )
    return calls


def _blocks(lines: list[str], path: Path) -> list[tuple[int, str, dict[str, str]]]:
    blocks: list[tuple[int, str, dict[str, str]]] = []
    for number, line in enumerate(lines, start=1):
        if line.startswith("["):
            blocks.append((number, line, {}))
        elif blocks and (field := _FIELD.fullmatch(line)):
            blocks[-1][2][field["name"]] = field["value"]
        elif blocks and line.strip():
            raise CorruptCaptureError(f'{path}:{number}: expected "  Name: value", got {line!r}')
    return blocks


def _call(
    key: str,
    parts: re.Match[str],
    fields: dict[str, str],
    *,
    index: int,
    rank: int,
    producers: dict[str, int],
) -> Call:
    module = "" if parts["module"] == "<none>" else parts["module"]
    phase: Phase = "backward" if fields.get("Phase") == "backward" else "forward"
    inputs_l1 = _numbers(fields.get("Input hashes", ""))
    outputs_l1 = _numbers(fields.get("Output hash", ""))
    names = fields.get("Input producers", "").split(";") if "Input producers" in fields else []
    count = max(len(inputs_l1), len(names))
    inputs = tuple(
        TensorRecord(
            name=str(place),
            dtype="",
            shape=(),
            producer=producers.get(names[place]) if place < len(names) else None,
            digest=_norm_only(inputs_l1[place]) if place < len(inputs_l1) else None,
        )
        for place in range(count)
    )
    shape = _SHAPE.fullmatch(fields.get("Shape", ""))
    outputs = [_output(shape, fields, outputs_l1)] if shape is not None else []
    for place in range(len(outputs), len(outputs_l1)):
        norm = _norm_only(outputs_l1[place])
        outputs.append(TensorRecord(name=str(place), dtype="", shape=(), digest=norm))
    return Call(
        index=index,
        key=key,
        kind="op",
        op=f"aten::{parts['op']}",
        step=0,
        rank=rank,
        phase=phase,
        module=module,
        inputs=inputs,
        outputs=tuple(outputs),
        source=fields.get("Location"),
        flags={"input_l1": inputs_l1, "output_l1": outputs_l1},
        replayable=False,
        note="from an activation log: statistics only",
    )


def _output(shape: re.Match[str], fields: dict[str, str], l1: list[float]) -> TensorRecord:
    sizes = tuple(int(size) for size in shape["sizes"].split(",") if size.strip())
    count = math.prod(sizes)
    least, most, mean, l2 = (_number(fields.get(name)) for name in ("Min", "Max", "Mean", "L2 norm"))
    digest = Digest(
        count=count,
        sum=mean * count,
        abs_sum=l1[0] if l1 else math.nan,
        sq_sum=l2 * l2,
        min=least,
        max=most,
        nan=0,
        pos_inf=0,
        neg_inf=0,
        hash="",
    )
    return TensorRecord(name="0", dtype=shape["dtype"], shape=sizes, digest=digest)


def _norm_only(norm: float) -> Digest | None:
    """A digest of which only sum|x| is known; None where not even that is."""
    if math.isnan(norm):
        return None
    nan = math.nan
    return Digest(
        count=0, sum=nan, abs_sum=norm, sq_sum=nan, min=None, max=None, nan=0, pos_inf=0, neg_inf=0, hash=""
    )


def _number(text: str | None) -> float:
    try:
        return float(text) if text is not None else math.nan
    except ValueError:
        return math.nan


def _numbers(text: str) -> list[float]:
    return [_number(part) for part in text.split(",") if part.strip()]
