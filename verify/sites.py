"""Where a kernel occurs in a captured run: which calls to judge, and which of many. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from bridge.capture.record import Call
from bridge.errors import UsageError, near_misses
from bridge.verify.spec import KernelSpec

if TYPE_CHECKING:
    from bridge.capture.store import Capture

#: A module call has parameters and upstream gradients, a dispatcher op its arguments, a launch pointers.
_RICHNESS = {"module": 0, "op": 1, "launch": 2}
#: torch's own operators, which no author of a kernel asks for.
_TORCH_OPS = ("aten::", "prims::")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """Calls worth judging, most telling first, and what was left out and why, in words."""

    calls: tuple[Call, ...]
    left_out: tuple[str, ...]


def find_calls(capture: Capture, spec: KernelSpec, *, op: str | None = None) -> tuple[Call, ...]:
    """Forward and optimizer calls of the spec's sites; the outermost where one site runs inside another.

    Args:
        op: what the user asked for; when it is not the spec's own name it may be a glob over keys, ops,
            module names and module classes, and takes precedence over `spec.sites`.

    Raises:
        UsageError: no call matches; says what the capture holds.
    """
    every = capture.calls
    picked: list[Call] = []
    if op is not None and op != spec.name:
        picked = [call for call in capture.find(op) if _is_judged(call)]
        if not picked:
            raise UsageError(_not_found(every, op, (op,), capture))
    else:
        wanted = spec.sites or (spec.name,)
        picked = [call for call in every if _is_judged(call) and any(_matches(call, site) for site in wanted)]
    if not picked and spec.sites:
        picked = [call for call in every if _is_judged(call) and _matches(call, spec.name)]
    if not picked:
        raise UsageError(_not_found(every, spec.name, spec.sites or (spec.name,), capture))
    return _outermost(picked, every)


def _is_judged(call: Call) -> bool:
    """A backward is judged with its forward, a recomputation repeats one; an optimizer step is its own."""
    return call.phase in ("forward", "optimizer")


def _matches(call: Call, site: str) -> bool:
    if call.op == site or (call.kind == "module" and call.module_class == site):
        return True
    if call.kind == "op" and "::" in site:
        return call.op.rsplit(".", 1)[0] == site
    return "::" not in site and _plain(call.op) == _plain(site)


def _plain(name: str) -> str:
    """Fold spelling away: OffsetRMSNorm and offset_rmsnorm are the same word."""
    return name.replace("_", "").casefold()


def _outermost(picked: Sequence[Call], every: Sequence[Call]) -> tuple[Call, ...]:
    """Drop calls that ran inside another picked one: the module call holds the same computation and more."""
    parents = {(call.step, call.rank, call.index): call.parent for call in every}
    ids = {(call.step, call.rank, call.index) for call in picked}

    def inside(call: Call) -> bool:
        parent = call.parent
        while parent is not None:
            if (call.step, call.rank, parent) in ids:
                return True
            parent = parents.get((call.step, call.rank, parent))
        return False

    return tuple(call for call in picked if not inside(call))


def _not_found(every: Iterable[Call], name: str, wanted: Sequence[str], capture: Capture) -> str:
    held = sorted({call.op for call in every if not (call.kind == "op" and call.op.startswith(_TORCH_OPS))})
    hint = near_misses(wanted[0], held) if held else "it holds no module calls, custom ops or Triton launches"
    stop = "" if hint.endswith("?") else ";"
    return (
        f"capture {capture.path} has no forward or optimizer call of {' | '.join(wanted)} (op {name}); "
        f"{hint}{stop} Recapture with --ops, name another site with --op GLOB, or set `sites` in the spec"
    )


def rank(calls: Sequence[Call]) -> Ranked:
    """Order calls so that any number of first ones has as much variety as possible.

    Calls whose inputs are bit-identical are judged once. The rest is grouped by module, shapes and dtypes;
    groups take turns, each giving its first, its last, the one with the largest and the one with the smallest
    values, then the others.
    """
    left_out: list[str] = []
    stored = [call for call in calls if _is_stored(call)]
    if len(stored) < len(calls):
        left_out.append(f"{plural(len(calls) - len(stored))} whose tensors were not stored (digests only)")
    best = min((_RICHNESS[call.kind] for call in stored), default=0)
    same_kind = [call for call in stored if _RICHNESS[call.kind] == best]
    distinct = list({_identity(call): call for call in reversed(same_kind)}.values())[::-1]
    if len(distinct) < len(same_kind):
        left_out.append(f"{plural(len(same_kind) - len(distinct))} with inputs identical to a judged one")
    groups: dict[object, list[Call]] = {}
    for call in distinct:
        groups.setdefault(group_of(call), []).append(call)
    turns = zip_longest(*(_by_interest(group) for group in groups.values()))
    ordered = [call for turn in turns for call in turn if call is not None]
    return Ranked(calls=tuple(ordered), left_out=tuple(left_out))


def plural(count: int) -> str:
    """ "1 call", "3 calls"."""
    return f"{count} call{'' if count == 1 else 's'}"


def _is_stored(call: Call) -> bool:
    return bool(call.inputs) and all(record.blob is not None for record in (*call.inputs, *call.params))


def _identity(call: Call) -> object:
    records = (*call.inputs, *call.params, *call.grad_outputs)
    return (
        call.op,
        repr(sorted(call.attrs.items())),
        *((r.name, r.blob, r.shape, r.stride, r.offset) for r in records),
    )


def group_of(call: Call) -> object:
    """Calls of one group differ in values only."""
    shapes = tuple((record.shape, record.stride, record.dtype) for record in (*call.inputs, *call.params))
    return (call.op, call.module.rpartition(".")[2], shapes)


def _by_interest(group: Sequence[Call]) -> list[Call]:
    def largest(call: Call) -> float:
        peaks = [
            max(abs(d.min or 0.0), abs(d.max or 0.0)) for r in call.inputs if (d := r.digest) is not None
        ]
        return max(peaks, default=0.0)

    ranked = sorted(group, key=largest)
    order = [group[0], group[-1], ranked[-1], ranked[0], *group]
    return list({id(call): call for call in order}.values())


def kernels_inside(capture: Capture, calls: Sequence[Call]) -> tuple[str, ...]:
    """Triton launches and custom ops that ran inside the calls (the calls themselves included)."""
    ids = {(call.step, call.rank, call.index) for call in calls}
    parents = {(call.step, call.rank, call.index): call.parent for call in capture.calls}
    names: dict[str, None] = {}
    for call in capture.calls:
        if call.kind == "module" or (call.kind == "op" and call.op.startswith(_TORCH_OPS)):
            continue
        place: int | None = call.index
        while place is not None:
            if (call.step, call.rank, place) in ids:
                names[call.op] = None
                break
            place = parents.get((call.step, call.rank, place))
    return tuple(names)
