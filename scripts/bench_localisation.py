"""Does `bridge diff` name the culprit? Plants one fault at a time into the demo run, looks at the suspect.

    python scripts/bench_localisation.py [--json] [--only TEXT] [--digests]

Prints one row a change. A fault is localised when the first suspect is the planted call or lies in its
module; a legal change must name no suspect. Every pair is judged twice: with tensors (replay), and from
digests as captures without tensors have them. Changes named "held-out: ..." are of another model and dtype
than the thresholds were tuned on, and are counted apart.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).parent))
from localisation_change import Change, Plant
from localisation_faults import faults, legal
from localisation_heldout import held_out_faults, held_out_legal
from localisation_kernels import kernel_faults, kernel_legal
from localisation_ranks import rank_faults, rank_legal, run_ranks

from bridge.capture import capture_run
from bridge.capture.steps import StepRecorder
from bridge.config import BridgeConfig, TrainConfig
from bridge.verify.diff import diff_captures
from bridge.verify.diff_document import DiffDocument
from bridge.verify.runs import Run, load_run


def all_changes() -> list[Change]:
    """Every planted change: faults, then legal ones."""
    wrong = [*faults(), *kernel_faults(), *rank_faults()]
    return [*wrong, *legal(), *kernel_legal(), *rank_legal(), *held_out_faults(), *held_out_legal()]


@contextlib.contextmanager
def planted(plants: list[Plant]) -> Iterator[None]:
    """Apply changes to the model of every run that starts inside."""
    plain = StepRecorder.attach

    def attach(recorder: StepRecorder, parts: Any, facts: Any) -> None:
        for plant in plants:
            plant(parts[0])
        plain(recorder, parts, facts)

    StepRecorder.attach = attach  # type: ignore[method-assign]
    try:
        yield
    finally:
        StepRecorder.attach = plain  # type: ignore[method-assign]


def capture_side(change: Change, side: str, out: Path) -> None:
    """Capture the first step of one side of a change, with all tensors, in this process."""
    base = [change.base] if change.base else []
    plants, settings = base, dict(change.base_settings)
    if side == "candidate":
        plants = [change.plant] if change.plant else base
        settings.update(change.settings)
    module, _, function = change.config.partition(":")
    config = BridgeConfig(
        train=TrainConfig(module=module, config=function, set={"training.steps": 100, **settings})
    )
    torch.set_num_threads(change.threads if side == "candidate" else 1)
    with planted(plants):
        capture_run(config, step=1, out=out, ops=["*"], tensors="all", force=True)
    torch.set_num_threads(1)


def ranks_of(change: Change, side: str) -> int:
    """Processes of one side of a change."""
    return change.ranks if side == "candidate" or not change.base_ranks else change.base_ranks


def capture_ranks(changes: list[Change], folder: Path) -> None:
    """Capture, for all changes at once, the sides that need several processes."""
    jobs: dict[int, list[tuple[str, str, Path]]] = {}
    for number, change in enumerate(changes):
        for side in ("baseline", "candidate"):
            if ranks_of(change, side) > 1 and not change.missing():
                job = change.name, side, folder / f"{side}-{number}"
                jobs.setdefault(ranks_of(change, side), []).append(job)
    for ranks, listed in jobs.items():
        run_ranks(listed, ranks)


def pair(change: Change, folder: Path, number: int) -> tuple[Path, Path]:
    """Captures of baseline and candidate; the baseline of plain runs is made once."""
    plain = not change.base and not change.base_settings
    sides = []
    for side in ("baseline", "candidate"):
        out = folder / f"{side}-{number}"
        if ranks_of(change, side) == 1:
            if plain and side == "baseline":
                out = folder / change.config.replace(":", ".")
            if not out.exists():
                capture_side(change, side, out)
        sides.append(out)
    return sides[0], sides[1]


def without_tensors(run: Run) -> Run:
    """What `bridge capture --tensors none` would have left: no gradients of modules either."""
    calls = [
        msgspec.structs.replace(call, grad_inputs=(), grad_outputs=()) if call.kind == "module" else call
        for call in run.calls
    ]
    return Run(label=run.label, path=run.path, calls=calls, manifest=run.manifest)


def found(change: Change, document: DiffDocument) -> tuple[bool, str]:
    """Whether the outcome is right, and the first suspect."""
    if not document.suspects:
        return not change.where, document.outcome.lower()
    first = document.suspects[0]
    if not change.where:
        return False, first.key
    inside = any(
        first.module == where or first.module.startswith(f"{where}.") or where in first.op.rsplit("::", 1)[-1]
        for where in change.where
    )
    return inside, first.key


def run(
    changes: list[Change], *, digests_only: bool = False, each: Callable[[dict[str, Any]], None] | None = None
) -> list[dict[str, Any]]:
    """One row a change."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        capture_ranks(changes, Path(folder))
        for number, change in enumerate(changes):
            missing = change.missing()
            if missing:
                print(f"skipped {change.name}: {missing}", file=sys.stderr)
                continue
            begun = time.perf_counter()
            a, b = pair(change, Path(folder), number)
            row: dict[str, Any] = {"name": change.name, "kind": "fault" if change.where else "legal"}
            for how in ("digests",) if digests_only else ("tensors", "digests"):
                sides = (load_run(a, "A"), load_run(b, "B"))
                if how == "digests":
                    sides = (without_tensors(sides[0]), without_tensors(sides[1]))
                document = diff_captures(*sides, allow_mismatch=True)
                row[how], row[f"{how}_suspect"] = found(change, document)
                if change.where and document.suspects:
                    row["reason"] = document.suspects[0].reason
            if b.name.startswith("candidate"):
                shutil.rmtree(b)
            row["seconds"] = round(time.perf_counter() - begun, 2)
            rows.append(row)
            if each is not None:
                each(row)
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many faults are localised, and how many legal changes name no suspect; held-out ones apart."""
    result: dict[str, Any] = {}
    apart = [row for row in rows if row["name"].startswith("held-out")]
    if apart and len(apart) < len(rows):
        rows = [row for row in rows if row not in apart]
        result["held_out"] = summary(apart)
    for kind in ("fault", "legal"):
        chosen = [row for row in rows if row["kind"] == kind]
        result[kind] = len(chosen)
        for how in ("tensors", "digests"):
            if chosen and how in chosen[0]:
                result[f"{kind}_{how}"] = sum(row[how] for row in chosen)
    return result


def show(row: dict[str, Any]) -> None:
    """Print one row of the table."""
    marks = " ".join(
        f"{'ok  ' if row[how] else 'MISS'} {row[f'{how}_suspect'][:56]:56}"
        for how in ("tensors", "digests")
        if how in row
    )
    print(f"{row['kind']:5} {row['name'][:38]:38} {marks} {row['seconds']:5.1f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--only", default="", help="changes whose name contains this")
    parser.add_argument("--digests", action="store_true", help="from digests alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    changes = [change for change in all_changes() if options.only in change.name]
    rows = run(changes, digests_only=options.digests, each=None if options.json else show)
    figures = summary(rows)
    print(json.dumps({**figures, "rows": rows}) if options.json else figures)
    wrong = [row for row in rows if not row.get("tensors", row["digests"])]
    return 1 if len(wrong) > 0.05 * len(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
