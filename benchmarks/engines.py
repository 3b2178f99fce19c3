"""Which engine shards with FSDP2 and resumes exactly? Lightning Fabric and Accelerate, each as its manual has it.

torchrun --standalone --nproc-per-node 2 benchmarks/engines.py fabric
torchrun --standalone --nproc-per-node 2 benchmarks/engines.py accelerate
"""

import argparse
import os
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from acutance.models import ViT

HALF = 3  # steps before and after the checkpoint
WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))


def build():
    torch.manual_seed(0)
    return ViT(image_size=8, patch_size=2, in_chans=1, dim=24, depth=2, heads=3, num_classes=10, dropout=0.1)


class Fabric:
    """FSDP2 is its ModelParallelStrategy, to which we say how to shard."""

    def __init__(self):
        from lightning.fabric import Fabric
        from lightning.fabric.strategies import ModelParallelStrategy

        strategy = ModelParallelStrategy(self.shard, data_parallel_size=WORLD, tensor_parallel_size=1)
        self.fabric = Fabric(accelerator="cpu", devices=WORLD, strategy=strategy)
        self.fabric.launch()
        self.model = self.fabric.setup_module(build())
        self.optimiser = self.fabric.setup_optimizers(torch.optim.AdamW(self.model.parameters(), lr=1e-3))
        self.backward = self.fabric.backward

    @staticmethod
    def shard(model, mesh):
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data_parallel"])
        return fully_shard(model, mesh=mesh["data_parallel"])

    def save(self, folder):
        self.fabric.save(folder, {"model": self.model, "optimiser": self.optimiser})

    def load(self, folder):
        self.fabric.load(folder, {"model": self.model, "optimiser": self.optimiser})


class Accelerate:
    """FSDP2 is a plugin."""

    def __init__(self):
        from accelerate import Accelerator, FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
        )
        self.accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model = build()
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.model, self.optimiser = self.accelerator.prepare(model, optimiser)
        self.backward = self.accelerator.backward

    def save(self, folder):
        self.accelerator.save_state(str(folder))

    def load(self, folder):
        self.accelerator.load_state(str(folder))


def advance(engine, first, last):
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        images, labels = torch.randn(8, 1, 8, 8, generator=generator), torch.arange(8)
        torch.manual_seed(1000 * step + RANK)  # of the dropout
        engine.backward(F.cross_entropy(engine.model(images[RANK::WORLD]), labels[RANK::WORLD]))
        engine.optimiser.step()
        engine.optimiser.zero_grad()


def weights(engine):
    return {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in engine.model.named_parameters()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=("fabric", "accelerate"))
    kind = {"fabric": Fabric, "accelerate": Accelerate}[parser.parse_args().engine]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    straight, first, second = kind(), kind(), kind()
    with tempfile.TemporaryDirectory() as root:
        shared = [root]
        dist.broadcast_object_list(shared)
        folder = Path(shared[0]) / "checkpoint"
        advance(straight, 0, 2 * HALF)
        advance(first, 0, HALF)
        first.save(folder)
        dist.barrier()
        second.load(folder)
        advance(second, HALF, 2 * HALF)
        same = all(torch.equal(a, b) for a, b in zip(weights(straight).values(), weights(second).values(), strict=True))
        if RANK == 0:
            print("parameters are", type(next(iter(straight.model.parameters()))).__name__)
            print("resumed to the same bits:", same)
            print("the checkpoint's files:", ", ".join(sorted(p.name for p in folder.rglob("*") if p.is_file())))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
