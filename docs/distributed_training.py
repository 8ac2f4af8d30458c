# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Data-parallel training through IREE: `DistributedDataParallel` around a compiled model.

    torchrun --nproc-per-node 2 docs/distributed_training.py --steps 5

Without a GPU it runs on the CPU, with gloo in NCCL's place. Every process sees its share of each batch; the first one
then trains the same model alone, in eager PyTorch on whole batches, and compares the weights.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator

import torch
import torch.distributed as dist
from distributed_inference import join
from torch.nn.parallel import DistributedDataParallel

from iree_marshal import backend

BATCH = 64


def make_model(device: torch.device) -> torch.nn.Module:
    """Make a model; the same weights everywhere. No batch norm: its statistics would be those of a share."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.Linear(32, 64),
        torch.nn.GELU(),
        torch.nn.LayerNorm(64),
        torch.nn.Linear(64, 64),
        torch.nn.GELU(),
        torch.nn.Linear(64, 10),
    )
    return layers.to(device)


def batches(steps: int, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Make examples and labels; the same everywhere."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        examples = torch.randn(BATCH, 32, generator=generator)
        labels = torch.randint(0, 10, (BATCH,), generator=generator)
        yield examples.to(device), labels.to(device)


def train(model: torch.nn.Module, steps: int, device: torch.device, rank: int = 0, world: int = 1) -> None:
    """Train on this process's share of each batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for examples, labels in batches(steps, device):
        mine = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(examples[mine]), labels[mine])
        loss.backward()  # averages the gradients of all processes
        optimizer.step()


def difference(ours: torch.nn.Module, reference: torch.nn.Module) -> float:
    """Return the largest difference of two weights, relative to the largest weight."""
    left, right = (torch.cat([one.detach().flatten() for one in model.parameters()]) for model in (ours, reference))
    return float((left - right).abs().max() / right.abs().max())


def main() -> None:
    """Train, and compare with one process."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--steps", type=int, default=5)
    chosen = options.parse_args()

    device = join()
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(format=f"[{rank}] %(message)s")
    torch.backends.cuda.matmul.allow_tf32 = False

    model = make_model(device)
    compiled = torch.compile(model, backend=backend.register(), dynamic=False)
    parallel = DistributedDataParallel(compiled, device_ids=[device.index] if device.type == "cuda" else None)
    train(parallel, chosen.steps, device, rank, world)

    if rank == 0:
        alone = make_model(device)
        train(alone, chosen.steps, device)
        moved, error = difference(model, make_model(device)), difference(model, alone)
        print(f"{chosen.steps} steps, {world} processes on {device.type}: moved {moved:.1e}, error {error:.1e}")
        assert error < 1e-4 < moved, "not the weights that one process finds"
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
