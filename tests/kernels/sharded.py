"""One rank of test_overrides.py: what the overrides do with DTensors, compared with the plain result."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear

from bridge.kernels.adamw.optimizer import KernelAdamW
from bridge.kernels.fused_swiglu.override import fused_swiglu
from bridge.kernels.offset_rmsnorm.module import OffsetRMSNorm
from bridge.kernels.offset_rmsnorm.override import offset_rmsnorm
from bridge.kernels.rope.override import KernelComplexRoPE


def norm(mesh: DeviceMesh) -> None:
    """Activations by rows, by columns (which the norm must gather), and a weight that is itself sharded."""
    torch.manual_seed(0)
    x, weight, grad = torch.randn(3, 5, 24), 0.1 * torch.randn(24), torch.randn(3, 5, 24)
    module = offset_rmsnorm(OffsetRMSNorm.Config(dim=24)).build()

    def run(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
        module.weight = torch.nn.Parameter(weight)
        x = x.detach().requires_grad_()
        y = module(x)
        y.backward(grad)
        return [y.detach(), x.grad, module.weight.grad]

    plain = run(x, weight, grad)
    for rows, whole in ((Shard(1), Replicate()), (Shard(2), Replicate()), (Shard(0), Shard(0))):
        results = run(
            distribute_tensor(x, mesh, [rows]),
            distribute_tensor(weight, mesh, [whole]),
            distribute_tensor(grad, mesh, [rows]),
        )
        for name, one, two in zip(("y", "grad_x", "grad_weight"), plain, results, strict=True):
            torch.testing.assert_close(two.full_tensor(), one, rtol=1e-6, atol=1e-6, msg=f"{rows} {name}")


def rotary(mesh: DeviceMesh) -> None:
    """Three heads, which two ranks do not share evenly."""
    torch.manual_seed(0)
    module = KernelComplexRoPE.Config(dim=8, max_seq_len=16).build()
    query, key = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 3, 8)
    heads = [distribute_tensor(tensor, mesh, [Shard(2)]) for tensor in (query, key)]
    for one, two in zip(module(query, key), module(*heads), strict=True):
        assert torch.equal(two.full_tensor(), one)


def step(mesh: DeviceMesh) -> None:
    """Gradients that lie otherwise than their parameter, and partial sums that no reduction has seen."""
    torch.manual_seed(0)
    start, grad = torch.randn(24), torch.randn(24)

    def run(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        leaf = torch.nn.Parameter(param)
        leaf.grad = grad
        KernelAdamW([leaf], 0.1).step()
        return leaf.detach()

    plain = run(start.clone(), grad)
    part = DTensor.from_local(grad / mesh.size(), mesh, [Partial()], run_check=False)
    cases: list[tuple[Placement, torch.Tensor]] = [(Replicate(), part), (Shard(0), part)]
    cases += [(Shard(0), distribute_tensor(grad, mesh, [Replicate()]))]
    for placement, given in cases:
        found = run(distribute_tensor(start.clone(), mesh, [placement]), given)
        torch.testing.assert_close(found.full_tensor(), plain, rtol=1e-6, atol=1e-6, msg=str(placement))


def feed_forward(mesh: DeviceMesh) -> None:
    """The fused block under FSDP, whose hidden rows two ranks do not share evenly: values and checkpoint."""

    def linear(inputs: int, outputs: int) -> Linear.Config:
        return Linear.Config(in_features=inputs, out_features=outputs)

    config = FeedForward.Config(w1=linear(16, 25), w2=linear(25, 16), w3=linear(16, 25))
    torch.manual_seed(0)
    plain, x = config.build(), torch.randn(3, 16)
    stock, sharded, again = config.build(), fused_swiglu(config).build(), fused_swiglu(config).build()
    sharded.load_state_dict(plain.state_dict())
    for module in (stock, sharded, again):
        fully_shard(module, mesh=mesh)
    for module in (stock, again):
        torch.manual_seed(1)
        module.init_states()
    for name, tensor in stock.state_dict().items():
        assert torch.equal(again.state_dict()[name].to_local(), tensor.to_local()), f"initial {name}"
    for module in (plain, sharded):
        module(x).square().sum().backward()
    grad = sharded.w13.grad.full_tensor()
    torch.testing.assert_close(grad[:, 0], plain.w1.weight.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad[:, 1], plain.w3.weight.grad, rtol=1e-5, atol=1e-5)
    again.load_state_dict(sharded.state_dict(), strict=True)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(again.state_dict()[name].full_tensor(), tensor), name
    state = sharded.state_dict()
    del state["w1.weight"]
    for given in (state, {"w3.weight": plain.w3.weight.detach()}):
        assert "w1.weight" in again.load_state_dict(given, strict=False).missing_keys


def main() -> None:
    """Raises AssertionError where a sharded run differs."""
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ["STORE"], size)
    dist.init_process_group("gloo", rank=rank, world_size=size, store=store)
    mesh = init_device_mesh("cpu", (size,))
    for part in (norm, rotary, step, feed_forward):
        part(mesh)
    dist.destroy_process_group()


main()
