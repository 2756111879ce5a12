"""What capturing a step costs: plain step, our capture and torchtitan's logger side by side in one process.

Rounds are interleaved and the fastest of each kind counts, so that a busy machine hits all alike. A
captured step is timed from before the tracer begins until every file is written and closed. Beside the
step that stores every tensor stand the bandwidths of what it goes through: the link from the device (1 GiB
to pinned memory) and the folder's disk (as many threads as write it fastest, a file each).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bridge.capture import load_capture
from bridge.capture.select import Selection
from bridge.capture.tracer import Tracer

Step = Callable[[], Any]


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (1 + self.weight) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.w1, self.w3 = nn.Linear(width, 4 * width, bias=False), nn.Linear(width, 4 * width, bias=False)
        self.w2 = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        y = self.norm1(x)
        q, k, v = (
            w(y).view(rows, length, self.heads, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(y.transpose(1, 2).reshape(rows, length, width))
        y = self.norm2(x)
        return x + self.w2(nn.functional.silu(self.w1(y)) * self.w3(y))


class Decoder(nn.Module):
    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, max(1, width // 64)) for _ in range(layers))
        self.norm = Norm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def decoder_step(width: int, *, device: str, rows: int, length: int, layers: int) -> tuple[nn.Module, Step]:
    """A model and a function that trains it for one step."""
    torch.manual_seed(0)
    model = Decoder(width, layers, 2048).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, 2048, (rows, length + 1), device=device)

    def step() -> torch.Tensor:
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, step


def titan_step(which: str, *, device: str) -> tuple[nn.Module, Step]:
    """torchtitan 0.2.2 model "name:flavor:rows:length", trained in bf16 autocast with fused AdamW."""
    name, flavor, rows, length = which.split(":")
    package = importlib.import_module(f"torchtitan.models.{name}")
    arguments = getattr(package, f"{name}_args")[flavor]
    arguments.max_seq_len = int(length)
    torch.manual_seed(0)
    with torch.device(device), torch.no_grad():
        model = {"llama3": "Transformer", "qwen3": "Qwen3Model"}[name]
        net: nn.Module = getattr(package, model)(arguments)
        net.init_weights(torch.device(device))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, arguments.vocab_size, (int(rows), int(length) + 1), device=device)

    def step() -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = net(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        del logits
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return net, step


def timed(action: Callable[[], Any], device: str) -> tuple[float, float]:
    """Seconds that an action takes, the device's work included, and the processors' seconds in it."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
    begin, used = time.perf_counter(), time.process_time()
    action()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin, time.process_time() - used


def link_bandwidth() -> float:
    """GB/s from the device to pinned host memory: the best of five copies of 1 GiB."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    best = min(timed(lambda: target.copy_(source, non_blocking=True), "cuda")[0] for _ in range(5))
    return source.numel() / best / 1e9


def disk_bandwidth(folder: Path, *, nbytes: int = 1 << 30) -> dict[int, float]:
    """GB/s of writing memory into new files of a folder, by number of threads; each has a file of its own.

    The memory is not in a cache, as that of a step is not.
    """
    data = memoryview(torch.randint(0, 255, (nbytes,), dtype=torch.uint8).numpy())
    found = {}
    for count in (1, 2, 4, 8, 16):
        if count > max(os.cpu_count() or 1, 2):
            break
        paths = [folder / f"probe-{number}" for number in range(count)]

        def write(number: int, share: int = nbytes // count, files: list[Path] = paths) -> None:
            with files[number].open("wb", buffering=0) as file:
                for begin in range(number * share, (number + 1) * share, 8 << 20):
                    file.write(data[begin : begin + (8 << 20)])

        threads = [threading.Thread(target=write, args=(number,)) for number in range(count)]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found[count] = round(nbytes / (time.perf_counter() - begin) / 1e9, 2)
        for path in paths:
            path.unlink()
    return found


def captured(model: nn.Module, step: Step, out: Path, selection: Selection) -> None:
    """One step under the tracer, files and all."""
    shutil.rmtree(out, ignore_errors=True)
    tracer = Tracer(model, out=out, step=1, selection=selection)

    def run() -> None:
        with tracer:
            step()

    captured.action = run  # type: ignore[attr-defined]


def logger_class(path: str | None) -> Any:
    """DebugModeTracer of a local copy of torchtitan's activation_tracer.py; None without one."""
    if path is None:
        return None
    spec = importlib.util.spec_from_file_location("activation_tracer", path)
    if spec is None or spec.loader is None:
        sys.exit(f"--logger needs a Python file, got {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules["activation_tracer"] = module
    spec.loader.exec_module(module)
    return module.DebugModeTracer


@contextlib.contextmanager
def scratch(folder: str | None) -> Iterator[Path]:
    """A folder to capture into, removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix="bench-capture-", dir=folder))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def measure(
    model: nn.Module,
    step: Step,
    *,
    device: str,
    rounds: int,
    logger: Any,
    folder: str | None,
    tensors: bool = True,
) -> dict[str, Any]:
    """Seconds, ratios and memory of one model; with `tensors` of storing every tensor as well."""
    kinds = {"digest": Selection()}
    if tensors:
        kinds["tensors"] = Selection(patterns=("*",))
    seconds: dict[str, list[float]] = {"plain": [], **{kind: [] for kind in kinds}}
    processor: dict[str, list[float]] = {}
    memory: dict[str, float] = {}
    for _ in range(2):
        step()
    # What the step takes before anything was ever captured: "plain" below is a step between captured ones.
    untouched = min(timed(step, device)[0] for _ in range(rounds))
    with scratch(folder) as out:
        for kind, selection in kinds.items():
            captured(model, step, out / kind, selection)
            captured.action()  # type: ignore[attr-defined]

        def note(kind: str, action: Callable[[], Any]) -> None:
            wall, used = _peak(memory, kind, device, action)
            seconds.setdefault(kind, []).append(wall)
            processor.setdefault(kind, []).append(used)

        for _ in range(rounds):
            note("plain", step)
            for kind, selection in kinds.items():
                captured(model, step, out / kind, selection)
                note(kind, captured.action)  # type: ignore[attr-defined]
            if logger is not None:
                note("logger", _logged(logger, model, step))
        disk = disk_bandwidth(out) if tensors else {}
        manifest = load_capture(out / list(kinds)[-1]).manifest
        calls = len(load_capture(out / "digest").calls)
    plain = min(seconds["plain"])
    result: dict[str, Any] = {
        "seconds": {kind: round(min(values), 4) for kind, values in seconds.items()},
        "processor_seconds": {kind: round(min(values), 4) for kind, values in processor.items()},
        "ratios": {
            "uncaptured": round(plain / untouched, 2),
            **{kind: round(min(values) / plain, 2) for kind, values in seconds.items() if kind != "plain"},
        },
        "calls": calls,
        "stored_gb": round(manifest.stored_bytes / 1e9, 3),
        "dropped": len(manifest.dropped),
    }
    if tensors:
        result["bandwidth"] = _bandwidth(manifest.stored_bytes, min(seconds["tensors"]), plain, disk, device)
    if device == "cuda":
        base = memory["plain"]
        result["extra_peak_memory"] = {
            kind: round(peak / base - 1, 4) for kind, peak in memory.items() if kind != "plain"
        }
    return result


def _logged(logger: Any, model: nn.Module, step: Step) -> Callable[[], None]:
    def action() -> None:
        with logger(model):
            step()

    return action


def _bandwidth(
    nbytes: int, seconds: float, plain: float, disk: dict[int, float], device: str
) -> dict[str, Any]:
    """GB/s that were reached, over the whole step and beyond the plain one, and those of link and disk."""
    rate = nbytes / seconds / 1e9
    limits = {"disk": max(disk.values())}
    if device == "cuda":
        limits["link"] = round(link_bandwidth(), 2)
    return {
        "reached": round(rate, 2),
        "beyond_plain": round(nbytes / (seconds - plain) / 1e9, 2),
        **limits,
        "disk_by_threads": disk,
        "share": round(rate / min(limits.values()), 3),
    }


def _peak(memory: dict[str, float], kind: str, device: str, action: Callable[[], Any]) -> tuple[float, float]:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = timed(action, device)
    if device == "cuda":
        memory[kind] = max(memory.get(kind, 0.0), float(torch.cuda.max_memory_allocated()))
    return times


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(prog="scripts/bench capture", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("--width", type=int, nargs="*", default=[256, 1024], help="widths of the decoder")
    parser.add_argument(
        "--titan",
        nargs="+",
        default=[],
        metavar="MODEL:FLAVOR:ROWS:LENGTH",
        help="models of torchtitan 0.2.2, digests only: qwen3:0.6B:4:4096",
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--logger", metavar="FILE", help="local copy of torchtitan's activation_tracer.py")
    parser.add_argument("--folder", help="write captures here (default: the temporary folder)")
    given = parser.parse_args()
    logger = logger_class(given.logger)
    models = {}
    for width in given.width:
        model, step = decoder_step(
            width, device=given.device, rows=given.rows, length=given.length, layers=given.layers
        )
        models[f"width {width}"] = measure(
            model, step, device=given.device, rounds=given.rounds, logger=logger, folder=given.folder
        )
        if not given.json:
            print(f"width {width}: {json.dumps(models[f'width {width}'])}", flush=True)
    for which in given.titan:
        model, step = titan_step(which, device=given.device)
        models[which] = measure(
            model,
            step,
            device=given.device,
            rounds=given.rounds,
            logger=logger,
            folder=given.folder,
            tensors=False,
        )
        del model, step
        if not given.json:
            print(f"{which}: {json.dumps(models[which])}", flush=True)
    first = next(iter(models.values()))
    if given.json:
        facts = {"torch": torch.__version__, "device": given.device, "threads": torch.get_num_threads()}
        print(
            json.dumps(
                {"ratios": first["ratios"], "models": models, "machine": {**facts, "cpus": os.cpu_count()}}
            )
        )


if __name__ == "__main__":
    main()
