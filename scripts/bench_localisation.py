"""Does `bridge diff` name the culprit? Plants one fault at a time into the demo run, looks at the suspect.

    python scripts/bench_localisation.py [--json] [--only TEXT] [--digests]

Prints one row a change. A fault is localised when the first suspect is the planted call or lies in its
module; a legal change must name no suspect. Every pair is judged twice: with tensors (replay) and from
digests alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

sys.path.insert(0, str(Path(__file__).parent))
from localisation_faults import Change, Plant, faults, legal

from bridge.capture import capture_run
from bridge.capture.steps import StepRecorder
from bridge.config import BridgeConfig, TrainConfig
from bridge.verify.diff import diff_captures
from bridge.verify.diff_document import DiffDocument

#: The demo run on eager norms: kernels in the interpreter would only make it slow.
CONFIG = BridgeConfig(
    train=TrainConfig(module="bridge.demo", config="offset_decoder", set={"training.steps": 100})
)


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


def capture(
    out: Path, plants: list[Plant], settings: dict[str, Any], *, threads: int = 1, step: int = 1
) -> Path:
    """Capture one step with all tensors."""
    torch.set_num_threads(threads)
    with planted(plants):
        capture_run(CONFIG, step=step, out=out, ops=["*"], tensors="all", force=True, settings=settings)
    torch.set_num_threads(1)
    return out


def pair(change: Change, folder: Path) -> tuple[Path, Path]:
    """Captures of baseline and candidate."""
    base = [change.base] if change.base else []
    baseline = folder / ("shared" if not base and not change.base_settings else "baseline")
    if baseline.name == "baseline" or not baseline.exists():
        capture(baseline, base, change.base_settings)
    plants = [change.plant] if change.plant else base
    settings = {**change.base_settings, **change.settings}
    return baseline, capture(folder / "candidate", plants, settings, threads=change.threads)


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
        for change in changes:
            begun = time.perf_counter()
            a, b = pair(change, Path(folder))
            row: dict[str, Any] = {"name": change.name, "kind": "fault" if change.where else "legal"}
            for how in ("digests",) if digests_only else ("tensors", "digests"):
                document = diff_captures(a, b, replay=how == "tensors", allow_mismatch=True)
                row[how], row[f"{how}_suspect"] = found(change, document)
                if change.where and document.suspects:
                    row["reason"] = document.suspects[0].reason
            row["seconds"] = round(time.perf_counter() - begun, 2)
            rows.append(row)
            if each is not None:
                each(row)
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Shares of localised faults and of legal changes that name no suspect."""
    result: dict[str, Any] = {}
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
    changes = [change for change in (*faults(), *legal()) if options.only in change.name]
    rows = run(changes, digests_only=options.digests, each=None if options.json else show)
    figures = summary(rows)
    print(json.dumps({**figures, "rows": rows}) if options.json else figures)
    wrong = [row for row in rows if not row.get("tensors", row["digests"])]
    return 1 if len(wrong) > 0.05 * len(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
