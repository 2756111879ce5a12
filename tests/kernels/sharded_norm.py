"""One rank of test_overrides.py: the offset norm's override on DTensors, compared with the plain result."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from bridge.kernels.offset_rmsnorm.module import OffsetRMSNorm
from bridge.kernels.offset_rmsnorm.override import offset_rmsnorm


def main() -> None:
    """Raises AssertionError where the sharded run differs."""
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ["STORE"], size)
    dist.init_process_group("gloo", rank=rank, world_size=size, store=store)
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(0)
    x, weight, grad = torch.randn(2, 6, 24), 0.1 * torch.randn(24), torch.randn(2, 6, 24)
    module = offset_rmsnorm(OffsetRMSNorm.Config(dim=24)).build()

    def run(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
        module.weight = torch.nn.Parameter(weight)
        x = x.detach().requires_grad_()
        y = module(x)
        y.backward(grad)
        return [y.detach(), x.grad, module.weight.grad]

    plain = run(x, weight, grad)
    # By rows, by columns (which the norm must gather), and with a weight that is itself sharded.
    for rows, whole in ((Shard(1), Replicate()), (Shard(2), Replicate()), (Shard(0), Shard(0))):
        results = run(
            distribute_tensor(x, mesh, [rows]),
            distribute_tensor(weight, mesh, [whole]),
            distribute_tensor(grad, mesh, [rows]),
        )
        for name, one, two in zip(("y", "grad_x", "grad_weight"), plain, results, strict=True):
            torch.testing.assert_close(two.full_tensor(), one, rtol=1e-6, atol=1e-6, msg=f"{rows} {name}")
    dist.destroy_process_group()


main()
