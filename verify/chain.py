"""Run a chain of captured eager ops again on other inputs: in their dtypes, or in FP64. Needs torch.

Views are not calls of a capture: a consumer may read its producer's memory under another shape and
stride, so a chain hands on memory, not tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bridge.capture.layout import contiguous_stride, layout_of
from bridge.capture.record import Call, TensorRecord
from bridge.capture.store import Capture
from bridge.errors import KernelError
from bridge.verify.columns import Columns
from bridge.verify.rerun import rerun, rerun_wide, widen


def run_chain(
    capture: Capture,
    columns: Columns,
    run: list[int],
    feed: Mapping[tuple[int, int], torch.Tensor],
    last: Call,
    *,
    wide: bool,
) -> torch.Tensor:
    """First output of `last` when the calls of `run` are run on `feed`.

    Args:
        capture: of the run whose calls these are, for inputs that `feed` lacks (constants).
        columns: its columns.
        run: positions of the calls, in execution order.
        feed: tensors to read in place of the recorded ones, by (hash, shape number) of what was recorded.
        last: the call of the run whose output is wanted.
        wide: in FP64.

    Raises:
        KernelError: an op raised, or memory was read that the chain cannot give.
    """
    made: dict[int, tuple[TensorRecord, torch.Tensor]] = {}
    for at in run:
        call = columns.calls[at]
        tensors = {}
        for place, record in enumerate(call.inputs):
            row = int(columns.reads.start[at]) + place
            content = int(columns.reads.hash[row]), int(columns.reads.shape[row])
            if record.storage in made and record.producer is not None:
                tensors[record.name] = _view(*made[record.storage], record)
            elif content in feed:
                value = feed[content]
                tensors[record.name] = widen(value) if wide else value.clone()
            else:
                value = capture.tensor(record)
                tensors[record.name] = widen(value) if wide else value
        outputs = rerun_wide(call, tensors) if wide else rerun(call, tensors)
        for record, output in zip(call.outputs, outputs, strict=False):
            made[record.storage] = record, output
        if call is last:
            return outputs[0]
    raise KernelError(f"{last.key} is not a call of the chain")


def _view(source: TensorRecord, value: torch.Tensor, wanted: TensorRecord) -> torch.Tensor:
    """What `wanted` sees of the memory that `source` describes and `value` holds."""
    if wanted.shape == source.shape and wanted.stride == source.stride and wanted.offset == source.offset:
        return value
    stride = source.stride or contiguous_stride(source.shape)
    span = layout_of(source.shape, stride).span
    memory = torch.zeros(span, dtype=value.dtype, device=value.device)
    memory.as_strided(source.shape, stride).copy_(value.reshape(source.shape))
    start = wanted.offset - source.offset
    reach = layout_of(wanted.shape, wanted.stride or contiguous_stride(wanted.shape)).span
    if start < 0 or start + reach > span:
        raise KernelError(f"tensor {wanted.name!r} reads memory beyond what its producer wrote")
    return memory.as_strided(wanted.shape, wanted.stride or contiguous_stride(wanted.shape), start)
