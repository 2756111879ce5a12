#!/usr/bin/env python3
"""Build, check and measure every built-in kernel on a GPU; prints one Markdown table.

    PYTHONPATH=.links python scripts/gpu_kernels.py [--only NAME ...] [--skip-speed] [--quick] [--json FILE]

Numbers come first: a kernel whose verdict is not PASS is not timed. Needs torch, triton and a CUDA device; no
install and no torchtitan. Speed is the share of the bandwidth that a plain copy of 1 GiB reaches in this run.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from bridge.environment import package_versions
from bridge.kernels.adamw.op import adamw_step
from bridge.verify import KernelSpec, verify_kernel
from bridge.verify.registry import built_in_names, load_spec

#: More specs than a folder's SPEC: file below kernels/ and attribute.
VARIANTS = {"geglu": "ERF", "cross_entropy": "PLAIN", "rope": "INTERLEAVED"}
ROWS, COLUMNS = 16384, 4096

Tensors = list[torch.Tensor]


@dataclass
class Row:
    """One kernel's line of the table; speeds are shares of the copy bandwidth, 0..1."""

    name: str
    verdict: str = ""
    cases: int = 0
    compile: str = ""
    forward: float | None = None
    backward: float | None = None
    milliseconds: dict[str, float] = field(default_factory=dict)
    note: str = ""


def bytes_of(*tensors: torch.Tensor) -> int:
    """Bytes that reading or writing every element once moves."""
    return sum(t.numel() * t.element_size() for t in tensors)


def measure(function: Callable[[], Any], *, repeats: int = 30) -> float:
    """Median milliseconds of a call on the device, with the L2 cache cleared before each.

    The device is put to sleep first, so that it never waits for Python: what is timed is the kernels.
    """
    for _ in range(3):
        function()
    flush = torch.empty(2**28, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(4_000_000)
        flush.zero_()
        start.record()
        function()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in times)


def copy_bandwidth() -> float:
    """Bytes a second that copying 1 GiB moves, reading and writing."""
    source = torch.empty(2**29, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return 2.0 * bytes_of(source) / (measure(lambda: target.copy_(source)) * 1e-3)


def production(spec: KernelSpec) -> Tensors:
    """Inputs of (16384, 4096) elements in bf16, in the form the kernel takes."""
    name = spec.name.removesuffix("_erf").removesuffix("_plain").removesuffix("_interleaved")
    shape = (ROWS, 32, COLUMNS // 32) if name == "rope" else (ROWS, COLUMNS)
    return list(spec.sample(shape, torch.bfloat16, torch.Generator(device="cuda").manual_seed(0), "cuda"))


def as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    """Outputs as a tuple, also of a target that returns one tensor bare."""
    return result if isinstance(result, tuple) else (result,)


def compiles(spec: KernelSpec) -> str:
    """ "yes" when torch.compile(fullgraph=True) gives the bits of eager, forward and backward."""
    shape = min(spec.shapes, key=lambda shape: abs(math.prod(shape) - 1024))
    inputs = spec.sample(shape, torch.bfloat16, torch.Generator(device="cuda").manual_seed(1), "cuda")
    results = []
    for function in (spec.target, torch.compile(spec.target, fullgraph=True)):
        leaves = [tensor.detach().clone() for tensor in inputs]
        wrt = [leaves[spec.inputs.index(name)].requires_grad_() for name in spec.grads]
        outputs = as_tuple(function(*leaves, **spec.attrs))
        grads = torch.autograd.grad(outputs, wrt, [torch.ones_like(o) for o in outputs]) if wrt else ()
        results.append([*outputs, *grads])
    same = all(torch.equal(one, two) for one, two in zip(*results, strict=True))
    return "yes" if same else "other bits than eager"


def _adamw_in_place(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
    """The step as an optimizer makes it; the spec's target works on copies, which would be timed as well."""
    adamw_step(*tensors, backend="kernel", **options)
    return tensors[0]


def time_spec(spec: KernelSpec, row: Row, bandwidth: float) -> None:
    """Fill in speed of kernel, eager reference and compiled reference, forward and backward."""
    inputs = production(spec)
    wrt = [spec.inputs.index(name) for name in spec.grads]
    torch._dynamo.reset()
    candidates = {
        "kernel": _adamw_in_place if spec.name == "adamw" else spec.target,
        "eager": spec.reference,
        "compiled": torch.compile(spec.reference, fullgraph=True),
    }
    for which, function in candidates.items():
        leaves = [tensor.detach() for tensor in inputs]
        for index in wrt:
            leaves[index].requires_grad_()
        with torch.no_grad():
            row.milliseconds[f"forward {which}"] = measure(lambda f=function, x=leaves: f(*x, **spec.attrs))
        if wrt:
            outputs = as_tuple(function(*leaves, **spec.attrs))
            upstream = [torch.randn_like(output) for output in outputs]
            sources = [leaves[index] for index in wrt]
            row.milliseconds[f"backward {which}"] = measure(
                lambda o=outputs, s=sources, u=upstream: torch.autograd.grad(o, s, u, retain_graph=True)
            )
            del outputs, upstream
        torch.cuda.empty_cache()
    with torch.no_grad():
        outputs = as_tuple(spec.target(*inputs, **spec.attrs))
    forward = bytes_of(*inputs, *outputs)
    backward = bytes_of(*inputs, *outputs, *(inputs[index] for index in wrt))
    row.forward = forward / (row.milliseconds["forward kernel"] * 1e-3) / bandwidth
    if wrt:
        row.backward = backward / (row.milliseconds["backward kernel"] * 1e-3) / bandwidth


def check(source: str, bandwidth: float, *, speed: bool, quick: bool) -> Row:
    """Verdict, compilation and speed of one spec; an exception becomes the row's note."""
    row = Row(name=source)
    try:
        spec = load_spec(source).spec
        row.name = spec.name
        verdict = verify_kernel(source, quick=quick)
        row.verdict, row.cases = verdict.verdict, len(verdict.cases)
        if verdict.verdict == "FAIL":
            row.note = verdict.summary
        row.compile = compiles(spec)
        if speed and verdict:
            time_spec(spec, row, bandwidth)
    except Exception as error:
        traceback.print_exc()
        row.note = f"{type(error).__name__}: {error}".splitlines()[0][:160]
    return row


def table(rows: list[Row], bandwidth: float) -> str:
    """The Markdown table."""

    def share(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.0f} %"

    def times(row: Row, phase: str) -> str:
        found = [row.milliseconds.get(f"{phase} {which}") for which in ("kernel", "eager", "compiled")]
        return " / ".join("-" if value is None else f"{value:.3f}" for value in found)

    versions = package_versions()
    lines = [
        f"{torch.cuda.get_device_name()}, torch {versions.get('torch')}, triton {versions.get('triton')}; "
        f"copy {bandwidth / 1e12:.2f} TB/s; ({ROWS}, {COLUMNS}) bf16",
        "",
        "| kernel | verdict | cases | compile | forward, of copy | backward, of copy "
        "| forward ms kernel / eager / compiled | backward ms | note |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.name} | {row.verdict} | {row.cases} | {row.compile} "
        f"| {share(row.forward)} | {share(row.backward)} "
        f"| {times(row, 'forward')} | {times(row, 'backward')} | {row.note} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> int:
    """Exit 0 when every verdict is PASS and every kernel compiles, 1 otherwise, 2 without a GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], help="names of built-ins")
    parser.add_argument("--skip-speed", action="store_true", help="verdicts and compilation only")
    parser.add_argument("--quick", action="store_true", help="judge the declared shapes only before timing")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_kernels.py needs a CUDA device, this machine has none", file=sys.stderr)
        return 2
    folder = Path(__file__).resolve().parent.parent / "kernels"
    sources = [name for name in built_in_names() if not options.only or name in options.only]
    sources += [f"{folder / name / 'spec.py'}:{VARIANTS[name]}" for name in sources if name in VARIANTS]
    bandwidth = copy_bandwidth()
    rows = []
    for source in sources:
        rows.append(check(source, bandwidth, speed=not options.skip_speed, quick=options.quick))
        print(f"{rows[-1].name}: {rows[-1].verdict} {rows[-1].note}", file=sys.stderr, flush=True)
    print(table(rows, bandwidth))
    if options.json:
        document = {"bandwidth": bandwidth, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row.verdict == "PASS" and row.compile == "yes" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
