"""Two captures of 100,000 calls: how long a diff takes, how much memory, and how large its page is.

    python scripts/bench_diff.py [--calls N] [--json] [--keep DIR]

Prints {"seconds": ..., "peak_gb": ..., "page_mb": ...}: reading both folders, aligning, comparing, and
writing diff.json and the page, in a fresh process. The runs differ in one fault and all that follows it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from bridge.capture.lines import ContentLine
from bridge.capture.record import Call, Digest, Manifest, RankFiles, TensorRecord

LAYERS = 80
SEQUENCE = (
    ("attention_norm", "aten::_fused_rms_norm.default"),
    ("attention.wq", "aten::mm.default"),
    ("attention.wk", "aten::mm.default"),
    ("attention.wv", "aten::mm.default"),
    ("attention.rope", "aten::mul.Tensor"),
    ("attention", "aten::_scaled_dot_product_flash_attention.default"),
    ("attention.wo", "aten::mm.default"),
    ("", "aten::add.Tensor"),
    ("feed_forward.w1", "aten::mm.default"),
    ("feed_forward", "aten::silu.default"),
    ("feed_forward.w3", "aten::mm.default"),
    ("feed_forward", "aten::mul.Tensor"),
    ("feed_forward.w2", "aten::mm.default"),
)
SHAPE = (4, 2048, 4096)


class Contents:
    """Digests by content, as a capture keeps them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lines: list[ContentLine] = []

    def add(self, key: int, shift: float) -> int:
        """A content whose figures depend on `key`, moved a little by `shift`."""
        noise = random.Random(key)
        scale = 1.0 + shift
        count = SHAPE[0] * SHAPE[1] * SHAPE[2]
        digest = Digest(
            count=count,
            sum=noise.gauss(0, 1) * count**0.5 * scale,
            abs_sum=0.8 * count * scale,
            sq_sum=1.0 * count * scale * scale,
            min=-4.5 * scale,
            max=4.4 * scale,
            nan=0,
            pos_inf=0,
            neg_inf=0,
            hash=f"{noise.getrandbits(64) ^ (self.random.getrandbits(60) if shift else 0):016x}",
        )
        self.lines.append(ContentLine(content=len(self.lines), digest=digest))
        return len(self.lines) - 1


def synthetic(calls: int, *, fault_at: int | None) -> tuple[list[Call], list[ContentLine]]:
    """A step of many layers and microbatches, forward and backward; from `fault_at` on it differs."""
    contents = Contents(seed=1)
    counts: dict[str, int] = {}
    made: list[Call] = []
    last = contents.add(0, 0.0)
    producer = None
    for index, (microbatch, layer, part, op) in zip(range(calls), _places(calls), strict=False):
        module = f"layers.{layer}.{part}".rstrip(".")
        count = counts.get(module, 0)
        counts[module] = count + 1
        shift = 1e-3 if fault_at is not None and index >= fault_at else 0.0
        weight = contents.add(10**7 + layer, 0.0)
        output = contents.add(index + 1, shift)
        record = {"dtype": "bfloat16", "shape": SHAPE, "stride": (2048 * 4096, 4096, 1)}
        made.append(
            Call(
                index=index,
                key=f"{module}/op_{count}_{op[6:].split('.')[0]}",
                kind="op",
                op=op,
                step=1,
                phase="forward" if microbatch % 2 == 0 else "backward",
                microbatch=microbatch // 2,
                module=module,
                module_class="Linear",
                inputs=(
                    TensorRecord(name="0", producer=producer, content=last, **record),
                    TensorRecord(name="1", content=weight, **record),
                ),
                outputs=(TensorRecord(name="0", producer=index, content=output, **record),),
                source=f"model.py:{100 + layer} in forward",
            )
        )
        last, producer = output, index
    return made, contents.lines


def _places(calls: int) -> Iterator[tuple[int, int, str, str]]:
    microbatch = 0
    while calls > 0:
        for layer in range(LAYERS):
            for part, op in SEQUENCE:
                yield microbatch, layer, part, op
        calls -= LAYERS * len(SEQUENCE)
        microbatch += 1


def write(folder: Path, calls: list[Call], contents: list[ContentLine]) -> None:
    """A capture folder of format 1 with digests only."""
    rank = folder / "rank_00000"
    rank.mkdir(parents=True)
    encoder = msgspec.json.Encoder()
    files = {}
    for name, lines in (("calls.jsonl", calls), ("contents.jsonl", contents)):
        data = encoder.encode_lines(lines)
        (rank / name).write_bytes(data)
        files[f"rank_00000/{name}"] = hashlib.sha256(data).hexdigest()
    manifest = Manifest(
        complete=True, step=1, steps=(1,), seed=0, ranks=(RankFiles(rank=0, calls=len(calls), files=files),)
    )
    (folder / "manifest.json").write_bytes(encoder.encode(manifest))


def child(a: str, b: str, out: str) -> int:
    """Diff in this process and print the figures."""
    begun = time.perf_counter()
    from bridge import report
    from bridge.verify.diff import diff_captures, write_diff

    document = diff_captures(a, b)
    write_diff(document, Path(out) / "diff.json")
    diffed = time.perf_counter()
    report.write_report(document, Path(out) / "report.html")
    figures = {
        "seconds": round(time.perf_counter() - begun, 2),
        "diff_seconds": round(diffed - begun, 2),
        "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3),
        "page_mb": round((Path(out) / "report.html").stat().st_size / 1e6, 2),
        "document_mb": round((Path(out) / "diff.json").stat().st_size / 1e6, 2),
        "pairs": document.coverage.pairs,
        "outcome": document.outcome,
    }
    print(json.dumps(figures))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(*options.child)
    with tempfile.TemporaryDirectory() as folder:
        for name, fault in (("a", None), ("b", options.calls // 3)):
            write(Path(folder) / name, *synthetic(options.calls, fault_at=fault))
        command = [sys.executable, __file__, "--child", f"{folder}/a", f"{folder}/b", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        return done.returncode
    figures = json.loads(done.stdout)
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:14} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
