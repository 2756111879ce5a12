"""`bridge inspect`: what a capture folder holds and what it lacks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bridge import errors

if TYPE_CHECKING:
    from bridge.capture.record import Call, TensorRecord
    from bridge.inspect_capture import CaptureSummary


@click.command("inspect")
@click.argument("capture", type=click.Path(path_type=Path))
@click.argument("key", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="Calls shown for a KEY.")
@click.option("--check", is_flag=True, help="Read every byte and compare it with the hashes.")
def command(capture: Path, key: str | None, as_json: bool, limit: int, check: bool) -> int:
    """Say what CAPTURE holds: steps, calls, kernels, sizes, what was dropped, what is incomplete.

    With KEY (a glob over key, op, module and class) show those calls with their tensors' statistics.
    CAPTURE may also be an activation log of torchtitan's own tracer, or a folder of them. The exit
    code is 2 when the capture is incomplete, and with --check when a byte is not what was written.
    """
    import msgspec

    from bridge.inspect_capture import find_calls, summarise

    if key is not None:
        if check:
            raise errors.UsageError("--check looks at the whole capture; leave out KEY")
        calls = find_calls(capture, key)
        if as_json:
            click.echo(msgspec.json.format(msgspec.json.encode(calls), indent=2).decode())
            return errors.EXIT_OK
        for call in calls[:limit]:
            click.echo("\n".join(describe_call(call)) + "\n")
        if len(calls) > limit:
            click.echo(f"{len(calls) - limit} more match {key}; see them with --limit {len(calls)} or --json")
        return errors.EXIT_OK
    summary = summarise(capture, check=check)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(summary), indent=2).decode())
    else:
        click.echo("\n".join(describe(summary)))
    return errors.EXIT_OK if _is_whole(summary) else errors.EXIT_USAGE


def _is_whole(summary: CaptureSummary) -> bool:
    return summary.complete and not summary.missing


def describe(summary: CaptureSummary) -> list[str]:
    """The summary as lines of text."""
    from bridge.capture.request import size
    from bridge.inspect_capture import TOP_OPS

    state = "complete" if _is_whole(summary) else "INCOMPLETE"
    if summary.checked and state == "complete":
        state = "complete, every byte as it was written"
    lines = [f"{summary.path}: {summary.format}, {state}"]
    if not _is_whole(summary):
        # First, since what follows describes only what is left.
        faults = [*summary.problems, *(f"{name} is missing" for name in summary.missing)]
        more = f"; {len(faults) - 1} more below" if len(faults) > 1 else ""
        lines += [f"  problem    {fault}{more}" for fault in faults[:1]]
    steps = summary.steps
    window = f" of {steps[0]}:{steps[-1]}" if len(steps) > 1 else ""
    facts = [("step", f"{summary.step}{window}")]
    facts += [(name, f"{value:.6g}") for name, value in summary.metrics.items() if value is not None]
    if summary.seed is not None:
        facts.append(("seed", str(summary.seed)))
    if summary.world_size > 1:
        facts.append(("ranks", f"{len(summary.ranks)} of {summary.world_size}"))
    facts += [
        (name, value) for name, value in (("device", summary.device), ("created", summary.created)) if value
    ]
    if summary.versions:
        names = ("bridge", "torch", "triton", "torchtitan", "python")
        facts.append(
            ("versions", ", ".join(f"{n} {summary.versions[n]}" for n in names if n in summary.versions))
        )
    if summary.config_path:
        facts.append(("config", summary.config_path))
    facts.append(("calls", f"{summary.calls:,}: {_counts(summary.by_phase)}"))
    facts.append(("", _counts(summary.by_kind)))
    facts.append(("tensors", f"{summary.tensors:,} digested, {summary.tensors_stored:,} stored"))
    budget = f" of {size(summary.budget_bytes)}" if summary.budget_bytes else ""
    facts.append(("stored", f"{size(summary.stored_bytes)}{budget} in {summary.blobs:,} distinct contents"))
    if summary.dropped and summary.forecast_bytes:
        facts.append(("forecast", f"{size(summary.forecast_bytes)} for all that was selected"))
    lines += [f"  {name:<10} {value}" for name, value in facts]
    if summary.kernels:
        lines += ["", "  kernels"]
        lines += [f"    {op.calls:>6,} x {op.op}{_stored(op.stored)}" for op in summary.kernels]
    lines += ["", f"  most frequent of {len(summary.ops)} ops and modules"]
    lines += [f"    {op.calls:>6,} x {op.op}{_stored(op.stored)}" for op in summary.ops[:TOP_OPS]]
    lines += _section("not finite", [f"{key}" for key in summary.nonfinite])
    dropped = [f"{d.key} {d.tensor}, {size(d.bytes)}: {d.reason}" for d in summary.dropped]
    lines += _section(f"dropped ({len(dropped)})", dropped)
    lines += _section("missing", summary.missing)
    lines += _section("problems", summary.problems)
    return lines


def describe_call(call: Call) -> list[str]:
    """One call with its tensors' statistics, as lines of text."""
    lines = [f"{call.key}  #{call.index}  step {call.step}, rank {call.rank}, {call.phase}"]
    lines.append(f"  {call.kind:<10} {call.op}")
    facts = [
        ("in", f"{call.module} ({call.module_class})" if call.module_class else call.module),
        ("source", call.source or ""),
        ("forward", "" if call.forward is None else f"#{call.forward}"),
        ("inside", "" if call.parent is None else f"#{call.parent}"),
        ("writes", ", ".join(call.mutated)),
        ("attrs", _pairs(call.attrs)),
        ("flags", _pairs(call.flags)),
        ("note", call.note or ""),
    ]
    lines += [f"  {name:<10} {value}" for name, value in facts if value]
    groups = (
        ("input", call.inputs),
        ("param", call.params),
        ("output", call.outputs),
        ("grad out", call.grad_outputs),
        ("grad in", call.grad_inputs),
    )
    for title, records in groups:
        lines += [f"  {title:<10} {_tensor(record)}" for record in records]
    return lines


def _tensor(record: TensorRecord) -> str:
    shape = "x".join(map(str, record.shape)) or "scalar"
    text = f"{record.name:<12} {record.dtype} {shape}"
    if record.placements:
        text += f" {record.subclass} {', '.join(record.placements)} of {record.global_shape}"
    digest = record.digest
    if digest is not None:
        if digest.min is not None and digest.max is not None:
            finite = max(digest.count - digest.nan - digest.pos_inf - digest.neg_inf, 1)
            rms = (digest.sq_sum / finite) ** 0.5
            text += f"  [{digest.min:.4g}, {digest.max:.4g}] mean {digest.sum / finite:.4g} rms {rms:.4g}"
        for name, count in (("NaN", digest.nan), ("+Inf", digest.pos_inf), ("-Inf", digest.neg_inf)):
            if count:
                text += f"  {count:,} {name}"
        text += f"  {digest.hash}" if digest.hash else ""
    text += "  stored" if record.blob is not None else ""
    return text + (f"  from #{record.producer}" if record.producer is not None else "")


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())


def _stored(count: int) -> str:
    return f"  ({count:,} with tensors)" if count else ""


def _pairs(values: dict[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def _section(title: str, rows: Iterable[str], *, limit: int = 20) -> list[str]:
    found = list(rows)
    if not found:
        return []
    more = [f"    and {len(found) - limit} more; --json lists them all"] if len(found) > limit else []
    return ["", f"  {title}", *(f"    {row}" for row in found[:limit]), *more]
