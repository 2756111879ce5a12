"""How `bridge diff` grows with the number of calls: one process a size, prints seconds and peak memory."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path


def main() -> None:
    """Measure each size with bench_diff.py and print one object."""
    parser = argparse.ArgumentParser(prog="scripts/bench scale", description=__doc__)
    parser.add_argument("--calls", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    given = parser.parse_args()
    found: dict[str, list[float]] = {"calls": [], "seconds": [], "peak_gb": [], "page_mb": []}
    script = Path(__file__).with_name("bench_diff.py")
    for calls in given.calls:
        command = [sys.executable, str(script), "--calls", str(calls), "--json"]
        one = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        found["calls"].append(calls)
        for name in ("seconds", "peak_gb", "page_mb"):
            found[name].append(one[name])
        if not given.json:
            print(f"{calls:>9,} calls {one['seconds']:8.2f} s {one['peak_gb']:7.3f} GB", flush=True)
    if given.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
