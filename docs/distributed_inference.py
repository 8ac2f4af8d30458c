# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Data-parallel inference through IREE: every process has a GPU, the whole model and its share of the images.

    torchrun --nproc-per-node 2 docs/distributed_inference.py --images 512 --batch 64

Without a GPU it runs on the CPU, with gloo in NCCL's place. ResNet-50 needs ``iree_marshal[demo]``, ``--model tiny``
nothing more. The first process compares what all of them found with eager PyTorch.
"""

from __future__ import annotations

import argparse
import logging
import os
import time

import torch
import torch.distributed as dist

from iree_marshal import backend


def join() -> torch.device:
    """Join the other processes; returns the device of this one."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def tiny() -> torch.nn.Module:
    """Make a model that compiles in a second."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(8, 10),
    )


def resnet50() -> torch.nn.Module:
    """Make ResNet-50 with random weights."""
    from transformers import ResNetConfig, ResNetForImageClassification

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = ResNetForImageClassification(ResNetConfig(num_labels=1000))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.model(images).logits
            return logits

    return Logits()


def classify(model: torch.nn.Module, images: torch.Tensor, batch: int, device: torch.device) -> torch.Tensor:
    """Return the logits of images, batch by batch."""
    return torch.cat([model(part.to(device)) for part in images.split(batch)])


def main() -> None:
    """Classify random images, each process its share."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--model", choices=["resnet50", "tiny"], default="resnet50")
    options.add_argument("--images", type=int, default=64, help="over all processes (default 64)")
    options.add_argument("--batch", type=int, default=8, help="images per call of the model (default 8)")
    chosen = options.parse_args()

    device = join()
    rank, world = dist.get_rank(), dist.get_world_size()
    if chosen.images % (world * chosen.batch):
        raise SystemExit(
            f"--images must be a multiple of {world * chosen.batch}: {world} processes, {chosen.batch} a call"
        )
    logging.basicConfig(format=f"[{rank}] %(message)s")
    # torch rounds float32 to TF32 in convolutions on a GPU; the comparison below is of float32 with float32.
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)  # the same weights and images everywhere
    model = (tiny() if chosen.model == "tiny" else resnet50()).eval().to(device)
    images = torch.randn(chosen.images, 3, *((32, 32) if chosen.model == "tiny" else (224, 224)))
    share = images.chunk(world)[rank]

    compiled = torch.compile(model, backend=backend.register(), dynamic=False)
    with torch.no_grad():
        classify(compiled, share[: chosen.batch], chosen.batch, device)  # compiles, or finds it in the cache
        classify(compiled, share[: chosen.batch], chosen.batch, device)
        dist.barrier()
        begun = time.perf_counter()
        logits = classify(compiled, share, chosen.batch, device)
        parts = [torch.empty_like(logits) for _ in range(world)]
        dist.all_gather(parts, logits)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - begun
        if rank == 0:
            eager = classify(model, images, chosen.batch, device)
            error = float((torch.cat(parts) - eager).abs().max() / eager.abs().max())
            rate = chosen.images / seconds
            print(f"{chosen.images} images, {world} processes on {device.type}: {rate:.1f} images/s, error {error:.1e}")
            assert error < 1e-3, "not what eager PyTorch finds"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
