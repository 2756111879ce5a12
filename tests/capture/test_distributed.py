"""Two ranks on gloo: FSDP2 and tensor parallelism, bit-equal with and without a capture."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

from bridge.capture.record import Call
from bridge.capture.select import Selection
from bridge.capture.store import Capture, load_capture
from bridge.capture.tracer import Tracer
from tests.capture.conftest import Net

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch is built without distributed"
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fsdp_run(rank: int, mesh: Any, out: Path | None) -> list[Any]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    model = Net()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    tokens = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(rank))
    torch.manual_seed(5 + rank)
    results: list[Any] = []
    for step in range(4):
        tracer: Any = contextlib.nullcontext()
        if out is not None and step == 2:
            tracer = Tracer(model, out=out, step=step, selection=Selection(patterns=("*",)))
        with tracer:
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        results += [loss.item(), norm.full_tensor().item()]
        if out is not None and step == 2:
            tracer.finish(metrics={"loss": loss.item()})
    return [*results, *(p.to_local().clone() for p in model.parameters())]  # type: ignore[attr-defined]


def tensor_parallel_run(mesh: Any, out: Path | None) -> list[Any]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 8, bias=False))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    tracer: Any = contextlib.nullcontext()
    if out is not None:
        tracer = Tracer(model, out=out, step=0, selection=Selection(patterns=("*",)))
    with tracer:
        loss = model(torch.ones(3, 8)).pow(2).mean()
        loss.backward()
    if out is not None:
        tracer.finish()
    return [loss.item(), *(p.grad.to_local().clone() for p in model.parameters())]  # type: ignore[union-attr]


def worker(rank: int, port: int, folder: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        for name, run in (
            ("fsdp", lambda out: fsdp_run(rank, mesh, out)),
            ("tp", lambda out: tensor_parallel_run(mesh, out)),
        ):
            for plain, traced in zip(run(None), run(folder / name), strict=True):
                same = torch.equal(plain, traced) if isinstance(plain, torch.Tensor) else plain == traced
                assert same, f"{name} on rank {rank}: {plain} became {traced}"
            dist.barrier()
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    mp.spawn(worker, args=(free_port(), path), nprocs=2)
    return path


def calls_of(capture: Capture, op: str) -> list[Call]:
    return [call for call in capture.calls if call.op.startswith(op)]


def test_fsdp(folder: Path) -> None:
    capture = load_capture(folder / "fsdp")
    assert capture.complete, capture.problems
    assert [r.rank for r in capture.manifest.ranks] == [0, 1]
    capture.verify_files()
    norms = [c for c in capture.calls if c.key == "layers.0.norm"]
    assert [c.rank for c in norms] == [0, 1]
    assert norms[0].module_class == "Norm"
    assert norms[0].params[0].shape == (16,), "FSDP has gathered the parameter when the module runs"
    assert norms[0].params[0].digest == norms[1].params[0].digest
    assert norms[0].inputs[0].digest != norms[1].inputs[0].digest
    assert {r.name for r in norms[0].grad_inputs} == {"0", "weight"}

    sharded = [
        c for c in capture.calls if c.phase == "optimizer" and c.inputs and c.inputs[0].subclass == "DTensor"
    ]
    record = sharded[0].inputs[0]
    assert (record.mesh, record.placements) == ("(dp=2)", ("Shard(0)",))
    assert record.global_shape is not None
    assert record.global_shape[0] == 2 * record.shape[0]
    inside = [c for c in capture.calls if c.parent == sharded[0].index and c.rank == sharded[0].rank]
    assert inside[0].outputs[0].digest == sharded[0].outputs[0].digest


def test_a_gathered_buffer_is_what_the_ranks_gave(folder: Path) -> None:
    capture = load_capture(folder / "fsdp")
    gathers = calls_of(capture, "c10d::_allgather_base_")
    first, second = gathers[0], gathers[len(gathers) // 2]
    assert (first.rank, second.rank) == (0, 1)
    halves = [capture.tensor(call.inputs[1]) for call in (first, second)]
    gathered = capture.tensor(first.outputs[0])
    assert torch.equal(gathered, torch.cat(halves))
    assert first.inputs[0].digest is None, "what the buffer held before means nothing"


def test_functional_collectives_are_read_after_their_wait(folder: Path) -> None:
    capture = load_capture(folder / "tp")
    assert capture.complete, capture.problems
    reduces = calls_of(capture, "_c10d_functional::all_reduce")
    assert reduces
    assert all(r.digest is not None for c in reduces for r in c.outputs)
    half = len(reduces) // 2
    for left, right in zip(reduces[:half], reduces[half:], strict=True):
        given = [capture.tensor(call.inputs[0]) for call in (left, right)]
        assert torch.equal(capture.tensor(left.outputs[0]), given[0] + given[1])


def test_memory_that_a_collective_has_not_filled_yet_is_no_content(folder: Path) -> None:
    """gloo reduces into memory of its own and copies the result over in `wait`, as a call that is seen."""
    capture = load_capture(folder / "fsdp")
    scattered = calls_of(capture, "c10d::_reduce_scatter_base_")
    assert scattered
    for call in scattered:
        (copy,) = (
            c
            for c in calls_of(capture, "aten::copy_")
            if c.rank == call.rank and c.inputs[1].producer == call.index
        )
        assert copy.inputs[0].digest is None, "what it overwrites had not been filled"
        assert copy.outputs[0].digest == copy.inputs[1].digest == call.outputs[0].digest is not None
