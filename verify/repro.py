"""The smallest standalone script that still shows a failure.

`make_repro` takes a verdict, rebuilds its failing case from the capture or the seed, shrinks it, and writes
`repro.py` (imports torch and the kernel only), `inputs.safetensors` and `test_repro.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import torch

from bridge.errors import BridgeError, UsageError, near_misses
from bridge.verify import provenance, recheck, session
from bridge.verify.assemble import LOST
from bridge.verify.case import Case
from bridge.verify.child import HANGS
from bridge.verify.execute import run, run_target
from bridge.verify.golden import run_golden
from bridge.verify.judge import judge_case
from bridge.verify.options import Options
from bridge.verify.plan import OWN_FAMILIES
from bridge.verify.raised import RAISED
from bridge.verify.registry import LoadedSpec
from bridge.verify.repro_kernel import kernel_facts, needs
from bridge.verify.request import ConstantChoice, Request
from bridge.verify.shrink import Shrinker, compact
from bridge.verify.spec import KernelSpec
from bridge.verify.verdict import Constants, TensorVerdict, Verdict

#: The script that is written; a text with its facts in one JSON literal.
_TEMPLATE = "repro_script.txt"
#: Seconds after which the script takes a kernel that hung before for hanging still.
_PATIENCE = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Repro:
    """What was written."""

    folder: Path
    tensor: str
    case: str
    before: tuple[tuple[int, ...], ...]  #: shapes of the inputs in the verdict's case
    after: tuple[tuple[int, ...], ...]
    tries: int
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """How the script tells right from wrong without a reference: measured on golden, which it carries."""

    kind: str  #: "structure" | "max" | "rms" | "bias" | "inputs" | "runs"
    limit: float
    words: str


def make_repro(
    verdict: Verdict,
    *,
    out: Path,
    tensor: str | None = None,
    case: str | None = None,
    budget: int = 300,
    force: bool = False,
    say: Callable[[str], None] | None = None,
) -> Repro:
    """Write the smallest script that fails as `tensor` of `case` does; by default the worst failure.

    Args:
        out: folder to write; new or empty, or with `force` one that may be overwritten.
        budget: runs of the kernel that shrinking may take.

    Raises:
        UsageError: nothing failed, the inputs are no longer the same, or the failure does not come back.
    """
    tell = say or _silent
    entry = choose(verdict, tensor=tensor, case=case)
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not force)):
        raise UsageError(f"{out} exists; name another folder with --out, or overwrite with --force")
    request = recheck.stored_request(verdict, ConstantChoice())
    tell("rebuilding the case")
    family = next((record.family for record in verdict.cases if record.name == entry.case), "")
    # Looking for tile edges runs the kernel on every declared shape; these two families need none.
    quick = request.quick or family in OWN_FAMILIES
    deadly = {record.case for record in verdict.tensors if (record.structure or "").startswith(LOST)}
    quick_request = msgspec.structs.replace(request, quick=quick)
    loaded, declared, entries = session.prepare(quick_request, spared=deadly)
    start = next((item.load() for item in entries if item.name == entry.case), None)
    if start is None:
        raise UsageError(
            f"case {entry.case!r} is gone: kernel or capture changed; judge again with `bridge verify`"
        )
    stored = next((record.input_digests for record in verdict.cases if record.name == entry.case), ())
    if stored and stored != provenance.case_digests(start):
        raise UsageError(f"inputs of {entry.case!r} are no longer those of the verdict; judge again")
    spec = loaded.spec
    shapes = tuple(tuple(t.shape) for t in start.inputs)
    if (entry.structure or "").startswith(LOST):
        # It would take this process along, so it is neither judged nor shrunk here.
        dies = Criterion(kind="runs", limit=0.0, words=entry.reason)
        _write(out, loaded, request, start, entry.tensor, dies, verdict)
        return Repro(
            folder=out, tensor=entry.tensor, case=entry.case, before=shapes, after=shapes, tries=0, limit=0.0
        )
    first = _judged(spec, start, declared.constants, entry.tensor)
    if first is None or first.verdict != "FAIL":
        raise UsageError(
            f"{entry.tensor} of {entry.case} does not fail any more; judge again with `bridge verify`"
        )
    criterion = find_criterion(spec, start, first)
    if criterion is None:
        raise UsageError(
            f"{entry.tensor} of {entry.case} fails in a way that a script without bridge cannot show "
            f"({first.reason}); name another one with --tensor or --case"
        )
    ways = _ways(first)

    def fails(candidate: Case) -> bool:
        found = _judged(spec, candidate, declared.constants, entry.tensor)
        if found is None or found.verdict != "FAIL" or not ways & _ways(found):
            return False
        still = find_criterion(spec, candidate, found)
        if still is None or still.kind != criterion.kind:
            return False
        # The message may speak of sizes, the class does not.
        return still.kind != "runs" or still.words.split(":")[0] == criterion.words.split(":")[0]

    shrinker = Shrinker(fails, budget=budget)
    tell("shrinking")
    small = shrinker.shrink(start)
    final = _judged(spec, small, declared.constants, entry.tensor)
    assert final is not None, "the shrunk case was judged before"
    last = find_criterion(spec, small, final)
    assert last is not None, "the shrunk case met its criterion before"
    _write(out, loaded, request, small, entry.tensor, last, verdict)
    return Repro(
        folder=out,
        tensor=entry.tensor,
        case=entry.case,
        before=shapes,
        after=tuple(tuple(t.shape) for t in small.inputs),
        tries=shrinker.tries,
        limit=last.limit,
    )


def _silent(text: str) -> None:
    """Nobody wants to know."""


def choose(verdict: Verdict, *, tensor: str | None, case: str | None) -> TensorVerdict:
    """The failure to reproduce: on captured inputs before declared ones before others, the worst first.

    Raises:
        UsageError: nothing failed, or nothing of that name.
    """
    failed = [entry for entry in verdict.tensors if entry.verdict == "FAIL"]
    if not failed:
        raise UsageError(
            f"the verdict on {verdict.op} is {verdict.verdict}: no tensor failed, nothing to reproduce"
        )
    for what, wanted in (("tensor", tensor), ("case", case)):
        if wanted is not None:
            names = [getattr(entry, what) for entry in failed]
            failed = [entry for entry in failed if getattr(entry, what) == wanted]
            if not failed:
                raise UsageError(f"no failing {what} {wanted!r}; {near_misses(wanted, names)}")
    families = {record.name: record.family for record in verdict.cases}
    order = {"captured": 0, "declared": 1}

    def rank(entry: TensorVerdict) -> tuple[int, float]:
        error, threshold = entry.target_error, entry.threshold
        excess = error / threshold if error is not None and threshold else math.inf
        return order.get(families.get(entry.case, ""), 2), -excess

    return min(failed, key=rank)


def _judged(spec: KernelSpec, case: Case, constants: Constants, tensor: str) -> TensorVerdict | None:
    """The verdict on one tensor of one case; None where golden, reference or target refuse the inputs."""
    options = Options(repeats=1, sweeps=False, power=False)
    try:
        found = judge_case(spec, case, constants=constants, options=options)
    except (BridgeError, RuntimeError, ValueError, IndexError, AssertionError, TypeError):
        return None
    if found is None:
        return None
    return next((entry for entry in found.tensors if entry.tensor == tensor), None)


def _ways(entry: TensorVerdict) -> set[str]:
    """In which ways a tensor fails: the checks that say so."""
    ways = {name for name, check in entry.companions.items() if not check.passed}
    if entry.structure is not None:
        ways.add("structure")
    return ways or {entry.reason.partition(":")[0]}


def _results(
    spec: KernelSpec, case: Case, tensor: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Golden, reference and target of one tensor; None where one of them gives none."""
    golden, reference = run_golden(spec, case).named(), run(spec.reference, spec, case)
    target = run(spec.target, spec, case)
    if isinstance(reference, str) or isinstance(target, str):
        return None
    found = golden.get(tensor), reference.named().get(tensor), target.named().get(tensor)
    if any(item is None for item in found):
        return None
    return found  # type: ignore[return-value]


def find_criterion(spec: KernelSpec, case: Case, entry: TensorVerdict) -> Criterion | None:
    """The plainest check that this failure does not pass; None when it needs all of bridge."""
    if (entry.structure or "").startswith(RAISED):
        return Criterion(kind="runs", limit=0.0, words=entry.structure or "")
    watched = run_target(spec, case)
    if not isinstance(watched, str) and "was written to" in watched.faults.get(entry.tensor, ""):
        return Criterion(kind="inputs", limit=0.0, words=watched.faults[entry.tensor])
    results = _results(spec, case, entry.tensor)
    if results is None:
        return None
    golden, reference, target = results
    numbers = measure(golden, target)
    if numbers["structure"] > 0:
        return Criterion(
            kind="structure", limit=0.0, words=entry.structure or "NaN or Inf where golden has none"
        )
    eager = measure(golden, reference)
    if eager["structure"] > 0:
        return None
    if entry.threshold is not None and numbers["max"] > entry.threshold:
        return Criterion(
            kind="max", limit=entry.threshold, words="fudge_factor * reference error + rounding floor"
        )
    for kind, factor, words in (
        ("rms", 1.25, "1.25 times the RMS error of eager"),
        ("bias", 2.0, "twice eager's bias"),
    ):
        floor = 0.05 if kind == "bias" else 0.0
        limit = max(factor * eager[kind], floor)
        if numbers[kind] > limit:
            return Criterion(kind=kind, limit=limit, words=words)
    return None


def measure(golden: torch.Tensor, got: torch.Tensor) -> dict[str, float]:
    """What the script measures too: places of non-finite values, greatest and RMS error, bias in ULP."""
    want = golden.detach().double().to(got.dtype).double().cpu()
    exact, have = golden.detach().double().cpu(), got.detach().double().cpu()
    if have.shape != exact.shape:
        return {"structure": math.inf, "max": math.inf, "rms": math.inf, "bias": math.inf}
    wrong = (have.isnan() != want.isnan()) | ((have != want) & (have.isinf() | want.isinf()))
    keep = have.isfinite() & exact.isfinite()
    gap = (have - exact)[keep]
    if not gap.numel():
        return {"structure": float(wrong.sum()), "max": 0.0, "rms": 0.0, "bias": 0.0}
    size = exact[keep].abs().clamp_min(torch.finfo(got.dtype).tiny)
    ulp = torch.exp2(size.log2().floor()) * torch.finfo(got.dtype).eps
    return {
        "structure": float(wrong.sum()),
        "max": float(gap.abs().max()),
        "rms": float(gap.square().mean().sqrt()),
        "bias": float((gap / ulp).mean().abs()),
    }


def _write(
    out: Path,
    loaded: LoadedSpec,
    request: Request,
    case: Case,
    tensor: str,
    criterion: Criterion,
    verdict: Verdict,
) -> None:
    from safetensors.torch import save_file

    spec = loaded.spec
    out.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    layouts: dict[str, Any] = {}
    named = dict(zip(spec.inputs, case.inputs, strict=True))
    named |= {f"grad_output {name}": g for name, g in zip(spec.outputs, case.grad_outputs, strict=False)}
    for name, value in named.items():
        packed = compact(value.cpu())
        tensors[name] = packed.as_strided((packed.untyped_storage().nbytes() // packed.element_size(),), (1,))
        layouts[name] = {"shape": list(packed.shape), "stride": list(packed.stride())}
    golden = run_golden(spec, case).named()[tensor]
    assert golden is not None, "the failing tensor has a golden value"
    tensors["golden"] = golden.detach().double().cpu().contiguous()
    layouts["golden"] = {"shape": list(golden.shape), "stride": list(tensors["golden"].stride())}
    kernel = kernel_facts(loaded, request, case, out)
    facts = {
        "op": spec.name,
        "tensor": tensor,
        "case": case.name,
        "inputs": list(spec.inputs),
        "outputs": list(spec.outputs),
        "grads": list(spec.grads),
        "attrs": {name: _plain(name, value) for name, value in case.attrs.items()},
        "layouts": layouts,
        "criterion": {"kind": criterion.kind, "limit": criterion.limit, "words": criterion.words},
        "timeout": _PATIENCE if HANGS in criterion.words else None,
        "kernel": kernel,
        "versions": verdict.provenance.versions,
        "device": verdict.provenance.device,
    }
    save_file(tensors, str(out / "inputs.safetensors"))
    script = resources.files("bridge.verify").joinpath(_TEMPLATE).read_text(encoding="utf-8")
    # The literal stands in a raw string, so no quote may end it.
    literal = json.dumps(facts, indent=4, default=str).replace("'", "\\u0027")
    script = script.replace("@NEEDS@", needs(kernel))
    (out / "repro.py").write_text(
        script.replace('"@FACTS@"', f"json.loads(r'''{literal}''')"), encoding="utf-8"
    )
    (out / "test_repro.py").write_text(_TEST, encoding="utf-8")


def _plain(name: str, value: Any) -> Any:
    """An attribute as the script's JSON holds it.

    Raises:
        UsageError: it has no such form.
    """
    if isinstance(value, torch.dtype):
        return str(value)
    try:
        json.dumps(value)
    except TypeError:
        raise UsageError(
            f"attribute {name} is a {type(value).__name__}, which a script's JSON cannot hold; "
            "make it a number, a string or a list"
        ) from None
    return value


_TEST = '''"""The failure as a test: it fails until the kernel is right."""

import subprocess
import sys
from pathlib import Path


def test_repro():
    # A process of its own: a kernel may kill it, and Triton reads its switches once per process.
    script = Path(__file__).with_name("repro.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
'''
