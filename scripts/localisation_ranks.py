"""Runs of several ranks for bench_localisation: what is planted into their collectives, and how they start.

    RANK=0 WORLD_SIZE=2 ... python scripts/localisation_ranks.py JOBS

captures what JOBS lists; started once a rank for all jobs, since starting is most of the time.
"""

from __future__ import annotations

import functools
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from localisation_change import Change, Plant, after

#: A configuration on which any number of ranks sees the same global batch of two sequences.
SHARED = "localisation_models:shared_batch"
ONE = {"training.local_batch_size": 2}


def run_ranks(jobs: Sequence[tuple[str, str, Path]], ranks: int) -> None:
    """Capture the given sides (change, side, folder), one after the other, in that many processes."""
    listed = [[name, side, str(out), _free_port()] for name, side, out in jobs]
    command = [sys.executable, str(Path(__file__)), json.dumps(listed)]
    names = ("RANK", "LOCAL_RANK")
    logs = [tempfile.TemporaryFile() for _ in range(ranks)]
    workers = [
        subprocess.Popen(
            command,
            env={
                **os.environ,
                **dict.fromkeys(names, str(rank)),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
            },
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        while any(worker.poll() is None for worker in workers):
            if any(worker.poll() for worker in workers):
                break  # the others would wait for this one's part
            time.sleep(0.2)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    for rank, worker in enumerate(workers):
        if worker.returncode > 0:
            logs[rank].seek(0)
            raise RuntimeError(f"rank {rank} failed: {logs[rank].read()[-2000:].decode()}")


def _free_port() -> int:
    """A port that nothing listens on, below those that systems hand out, so that none takes it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port


def same_weights(model: torch.nn.Module) -> None:
    """Give every parameter values that depend on its name alone, however it is sharded.

    torchtitan draws a shard's values on the rank that holds it: two ranks start from other weights than one.
    """
    for number, (name, parameter) in enumerate(model.named_parameters()):
        generator = torch.Generator().manual_seed(number)
        whole = torch.randn(parameter.shape, generator=generator)
        whole *= 0.1 if parameter.ndim == 1 else 0.5 if "embeddings" in name else parameter.shape[-1] ** -0.5
        with torch.no_grad():
            if not hasattr(parameter, "to_local"):
                parameter.copy_(whole)
                continue
            mesh = parameter.device_mesh
            local = parameter.to_local()
            local.copy_(whole.chunk(mesh.size(), 0)[mesh.get_local_rank()])


def scaled_by_level(t: torch.Tensor, *, how: str = "right", groups: list[Any] | None = None) -> torch.Tensor:
    """`t` over the mean magnitude that it has on all ranks; right, or wrong in one named way."""
    world, rank = dist.get_world_size(), dist.get_rank()
    level = t.detach().abs().mean().reshape(1)
    if how == "max for mean":
        dist.all_reduce(level, op=dist.ReduceOp.MAX)
    elif how == "wrong group":
        assert groups is not None
        dist.all_reduce(level, group=groups[rank])
        level /= world
    elif how == "missing wait":
        # The other ranks come late, so what this one reads is surely not reduced yet.
        time.sleep(0.2 * rank)
        work = dist.all_reduce(level, async_op=True)
        early = level.clone()
        if rank == 0:
            work.wait()
            return t / (early / world)
        work.wait()
        level /= world
    else:
        dist.all_reduce(level)
        if how != "sum for mean":
            level /= world
    return t / level


def level(fqn: str, how: str) -> Plant:
    """Scale what one module returns by its level on all ranks."""

    def plant(model: torch.nn.Module) -> None:
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        after(fqn, functools.partial(scaled_by_level, how=how, groups=groups))(model)
        same_weights(model)

    return plant


def _comm(call: Callable[..., Any]) -> Any:
    """A reduce-scatter of FSDP's that `call` performs."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    class Planted(DefaultReduceScatter):
        def __call__(
            self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
        ) -> Any:
            return call(output_tensor, input_tensor, group, op)

    return Planted()


def _mean(output: Any, given: Any, group: Any, op: Any) -> None:
    dist.reduce_scatter_tensor(output, given, op=op, group=group)
    output.div_(dist.get_world_size())


def _largest(output: Any, given: Any, group: Any, op: Any) -> None:
    dist.reduce_scatter_tensor(output, given, op=dist.ReduceOp.MAX, group=group)


def _own_part(output: Any, given: Any, group: Any, op: Any) -> None:
    output.copy_(given.chunk(dist.get_world_size())[dist.get_rank()])


def scattered(fqn: str, call: Callable[..., Any]) -> Plant:
    """Another reduce-scatter for the gradients of one layer."""

    def plant(model: torch.nn.Module) -> None:
        model.get_submodule(fqn).set_custom_reduce_scatter(_comm(call))  # type: ignore[operator]
        same_weights(model)

    return plant


def rank_faults() -> list[Change]:
    """Faults of two ranks: the swapped, misdirected or unawaited collective."""
    module = "layers.0.ffn_norm"
    faults = [
        Change(name=f"2 ranks, all-reduce: {how}", where=(module,), config=SHARED, ranks=2,
               base=level(module, "right"), plant=level(module, how))
        for how in ("sum for mean", "max for mean", "wrong group", "missing wait")
    ]  # fmt: skip
    for name, call, where in (
        ("mean for sum", _mean, ("div_",)),
        ("max for sum", _largest, ("_reduce_scatter_base_",)),
        ("own part only", _own_part, ("copy_", "_reduce_scatter_base_")),
    ):
        faults.append(
            Change(name=f"2 ranks, reduce-scatter: {name}", where=where, config=SHARED, ranks=2,
                   base=same_weights, plant=scattered("layers.1", call))
        )  # fmt: skip
    return faults


def rank_legal() -> list[Change]:
    """The same global batch on one rank and on two, and two ranks again."""
    return [
        Change(name="1 rank against 2 ranks", config=SHARED, ranks=2, base_ranks=1, base=same_weights,
               base_settings=ONE, settings={"training.local_batch_size": 1}),
        Change(name="2 ranks against 1 rank", config=SHARED, ranks=1, base_ranks=2, base=same_weights,
               settings=ONE),
        Change(name="the same 2 ranks again", config=SHARED, ranks=2, base=same_weights),
    ]  # fmt: skip


def main() -> int:
    from bench_localisation import all_changes, capture_side

    changes = {change.name: change for change in all_changes()}
    for name, side, out, port in json.loads(sys.argv[1]):
        os.environ["MASTER_PORT"] = str(port)
        capture_side(changes[name], side, Path(out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
