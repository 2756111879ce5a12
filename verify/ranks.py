"""The ranks of one run as if one had done it all, for runs of different numbers of ranks. Loads no torch.

What every rank holds alike is kept. Shards of one DTensor are put together, and what else differs between
the ranks is taken for parts of a batch, laid end to end along the first dimension. Sums, extremes and counts
of a digest add up over parts; its hash does not, so such tensors are compared within rounding, never bit
for bit. Where that guess is wrong (each rank's own share of a sum, say) the shape shows it: there is nothing
of that shape in the other run, and the call has no counterpart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from bridge.capture.record import Call, Digest, TensorRecord

#: Relative precision of added digests: their sums may have been accumulated in FP32 blocks of other sizes.
PRECISION = 1e-6

_TENSORS = ("inputs", "outputs", "params", "grad_outputs", "grad_inputs")


def joined(calls: Sequence[Call]) -> list[Call]:
    """One call for each that all ranks made, in rank 0's order; calls that some rank lacks stay rank 0's."""
    first = min((call.rank for call in calls), default=0)
    others: dict[tuple[int, str], list[Call]] = {}
    ranks = set()
    for call in calls:
        ranks.add(call.rank)
        if call.rank != first:
            others.setdefault((call.step, call.key), []).append(call)
    result = []
    for call in calls:
        if call.rank != first:
            continue
        group = [call, *others.get((call.step, call.key), ())]
        whole = len(group) == len(ranks) and all(_alike(call, other) for other in group)
        result.append(_join(group) if whole else call)
    return result


def _alike(a: Call, b: Call) -> bool:
    return (a.op, a.kind, a.phase) == (b.op, b.kind, b.phase) and all(
        [record.name for record in getattr(a, field)] == [record.name for record in getattr(b, field)]
        for field in _TENSORS
    )


def _join(group: Sequence[Call]) -> Call:
    changes = {
        field: tuple(
            _join_records(records) for records in zip(*(getattr(call, field) for call in group), strict=True)
        )
        for field in _TENSORS
    }
    return msgspec.structs.replace(group[0], **changes)


def _join_records(records: Sequence[TensorRecord]) -> TensorRecord:
    first = records[0]
    digests = [record.digest for record in records if record.digest is not None]
    sharded = any(place.startswith("Shard") for place in first.placements)
    if not sharded and len(digests) == len(records) and len({digest.hash for digest in digests}) == 1:
        if all(record.shape == first.shape for record in records):
            return first
    shape = _whole_shape(records) if not sharded else first.global_shape
    numel = sum(math.prod(record.shape) for record in records)
    if shape is None or len(digests) != len(records) or math.prod(shape) != numel:
        # Parts that are no split of anything: a scalar a rank, a share of a sum, shards held twice.
        return msgspec.structs.replace(first, digest=None, blob=None, content=-1)
    return msgspec.structs.replace(
        first, shape=shape, stride=_dense(shape), offset=0, digest=_sum(digests), blob=None, content=-1
    )


def _whole_shape(records: Sequence[TensorRecord]) -> tuple[int, ...] | None:
    """The parts end to end along the first dimension; None when they do not fit together."""
    shapes = [record.shape for record in records]
    if any(not shape or shape[1:] != shapes[0][1:] for shape in shapes):
        return None
    return sum(shape[0] for shape in shapes), *shapes[0][1:]


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))


def _sum(digests: Sequence[Digest]) -> Digest:
    low = [digest.min for digest in digests if digest.min is not None]
    high = [digest.max for digest in digests if digest.max is not None]
    return Digest(
        count=sum(digest.count for digest in digests),
        sum=math.fsum(digest.sum for digest in digests),
        abs_sum=math.fsum(digest.abs_sum for digest in digests),
        sq_sum=math.fsum(digest.sq_sum for digest in digests),
        min=min(low, default=None),
        max=max(high, default=None),
        nan=sum(digest.nan for digest in digests),
        pos_inf=sum(digest.pos_inf for digest in digests),
        neg_inf=sum(digest.neg_inf for digest in digests),
        hash="",
    )
