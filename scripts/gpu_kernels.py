#!/usr/bin/env python3
"""Build, check and measure every built-in kernel on a GPU; prints one Markdown table.

    PYTHONPATH=.links python scripts/gpu_kernels.py [--only NAME ...] [--skip-speed] [--quick] [--jobs N]
        [--json FILE]

Numbers come first: a kernel whose verdict is not PASS is not timed. N processes judge at once, since most of
that time is compiling; times are taken afterwards, one kernel alone on the device. Needs torch, triton and a
CUDA device; no install and no torchtitan. Speed is the share of the bandwidth that a plain copy of 1 GiB
reaches in this run, counting the bytes that a kernel cannot do without.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
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
#: Inputs that a backward has no use for.
UNREAD_BY_BACKWARD = {"rope": ("x",)}
#: Sets of inputs that timed calls take in turn; together they are far larger than the L2 cache.
SETS = 3

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


def measure(function: Callable[[int], Any], *, calls: int = 20, repeats: int = 9) -> float:
    """Median milliseconds of a call on the device; `function` is given the number of the inputs to take.

    Calls run back to back, each on the next set of inputs, so none finds its data in the L2 cache, and each
    pays for writing back what the call before left there. (Clearing the cache by writing charges a kernel
    that only reads for that.) The device sleeps first, so that it never waits for Python.
    """
    for turn in range(SETS):
        function(turn)
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(20_000_000)
        function(0)
        start.record()
        for turn in range(calls):
            function((turn + 1) % SETS)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes a second that copying 1 GiB moves, reading and writing."""
    source = torch.empty(2**29, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return 2.0 * bytes_of(source) / (measure(lambda _: target.copy_(source)) * 1e-3)


def base_name(spec: KernelSpec) -> str:
    """Name of the kernel's folder."""
    return spec.name.removesuffix("_erf").removesuffix("_plain").removesuffix("_interleaved")


def production(spec: KernelSpec, seed: int) -> Tensors:
    """Inputs of (16384, 4096) elements in bf16, in the form the kernel takes."""
    shape = (ROWS, 32, COLUMNS // 32) if base_name(spec) == "rope" else (ROWS, COLUMNS)
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return list(spec.sample(shape, torch.bfloat16, generator, "cuda"))


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
    inputs = [production(spec, seed) for seed in range(SETS)]
    wrt = [spec.inputs.index(name) for name in spec.grads]
    torch._dynamo.reset()
    candidates = {
        "kernel": _adamw_in_place if spec.name == "adamw" else spec.target,
        "eager": spec.reference,
        "compiled": torch.compile(spec.reference, fullgraph=True),
    }
    for which, function in candidates.items():
        row.milliseconds |= _time_one(spec, which, function, inputs, wrt)
        torch.cuda.empty_cache()
    with torch.no_grad():
        outputs = as_tuple(spec.target(*inputs[0], **spec.attrs))
    unread = UNREAD_BY_BACKWARD.get(base_name(spec), ())
    read = [tensor for name, tensor in zip(spec.inputs, inputs[0], strict=True) if name not in unread]
    forward = bytes_of(*inputs[0], *outputs)
    backward = bytes_of(*read, *outputs, *(inputs[0][index] for index in wrt))
    row.forward = forward / (row.milliseconds["forward kernel"] * 1e-3) / bandwidth
    if wrt:
        row.backward = backward / (row.milliseconds["backward kernel"] * 1e-3) / bandwidth


def _time_one(
    spec: KernelSpec, which: str, function: Callable[..., Any], inputs: Sequence[Tensors], wrt: Sequence[int]
) -> dict[str, float]:
    sets = [[tensor.detach() for tensor in one] for one in inputs]
    for one in sets:
        for index in wrt:
            one[index].requires_grad_()
    with torch.no_grad():
        times = {f"forward {which}": measure(lambda turn: function(*sets[turn], **spec.attrs))}
    if wrt:
        outputs = [as_tuple(function(*one, **spec.attrs)) for one in sets]
        upstream = [[torch.randn_like(output) for output in one] for one in outputs]
        sources = [[one[index] for index in wrt] for one in sets]
        times[f"backward {which}"] = measure(
            lambda turn: torch.autograd.grad(outputs[turn], sources[turn], upstream[turn], retain_graph=True)
        )
    return times


def judge(source: str, quick: bool) -> Row:
    """Verdict and compilation of one spec; an exception becomes the row's note."""
    row = Row(name=source)
    try:
        spec = load_spec(source).spec
        row.name = spec.name
        verdict = verify_kernel(source, quick=quick)
        row.verdict, row.cases = verdict.verdict, len(verdict.cases)
        if verdict.verdict == "FAIL":
            row.note = verdict.summary
        row.compile = compiles(spec)
    except Exception as error:
        traceback.print_exc()
        row.note = f"{type(error).__name__}: {error}".splitlines()[0][:160]
    print(f"{row.name}: {row.verdict} {row.note}", file=sys.stderr, flush=True)
    return row


def judge_all(sources: Sequence[str], *, quick: bool, jobs: int) -> list[Row]:
    """`judge` each, in `jobs` processes that are gone when this returns."""
    if jobs == 1:
        return [judge(source, quick) for source in sources]
    # Each process compiles; inductor's own workers would come on top.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(judge, sources, [quick] * len(sources)))


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
    parser.add_argument("--jobs", type=int, default=1, help="processes that judge at once")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_kernels.py needs a CUDA device, this machine has none", file=sys.stderr)
        return 2
    folder = Path(__file__).resolve().parent.parent / "kernels"
    sources = [name for name in built_in_names() if not options.only or name in options.only]
    sources += [f"{folder / name / 'spec.py'}:{VARIANTS[name]}" for name in sources if name in VARIANTS]
    rows = judge_all(sources, quick=options.quick, jobs=options.jobs)
    bandwidth = copy_bandwidth()
    for source, row in zip(sources, rows, strict=True):
        if row.verdict == "PASS" and not options.skip_speed:
            time_spec(load_spec(source).spec, row, bandwidth)
    print(table(rows, bandwidth))
    if options.json:
        document = {"bandwidth": bandwidth, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row.verdict == "PASS" and row.compile == "yes" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
