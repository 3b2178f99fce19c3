"""The device and the processes of a run, by Lightning Fabric, with torch's own FSDP2 and tensors beneath it.

An error on one rank stops all ranks, also before there is a process group.
"""

import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from acutance import distributed
from acutance.distributed import gather
from acutance.errors import AcutanceError, import_extra
from acutance.lab.train.config import LoopConfig

T = TypeVar("T")
# Warnings that do not apply: our models change no output in place, and the strides cost nothing.
HARMLESS = ("FSDP2-wrapped module .* returned a view tensor", "Grad strides do not match bucket view strides")
SET_BY_FABRIC = {"LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
STACKS = ("blocks", "layers")  # the lists whose entries are sharded one by one
# Keeps the process group that was left last alive. If a DDP model held its last reference, freeing it would wait for
# the group's threads while these wait for Python's lock: sometimes a deadlock
# (https://github.com/pytorch/pytorch/issues/56297).
LEFT: list[Any] = []


class Engine:
    """The processes of a run, and the model as it is trained in them.

    `device` auto takes a GPU if there is one. `processes` None takes torchrun's number, else one per GPU, or 1.
    """

    def __init__(self, loop: LoopConfig, *, device: str = "auto", processes: int | None = None) -> None:
        several = int(os.environ.get("WORLD_SIZE", "1")) > 1 or (processes or 1) > 1
        if loop.strategy == "single" and several:
            raise AcutanceError("several processes need --strategy ddp or fsdp; single is one process")
        self.strategy: str = ("ddp" if several else "single") if loop.strategy == "auto" else loop.strategy
        self._compile, self._compile_blocks = loop.compile, loop.compile_blocks
        self._owns_group = not (dist.is_available() and dist.is_initialized())
        self._environment = dict(os.environ)
        self._fabric = _fabric(self.strategy, loop.precision, device, processes)
        self._fabric.launch()
        self.rank, self.world = int(self._fabric.global_rank), int(self._fabric.world_size)
        self.is_main = self.rank == 0  # writes files and prints
        self.device: torch.device = self._fabric.device
        self.backward = self._fabric.backward
        self.precision = self._fabric.autocast  # the casts of training, for a model called without its wrapper
        self.mean = self._fabric.all_reduce  # over the processes, entry by entry
        self.no_sync = self._fabric.no_backward_sync  # inside, gradients accumulate without being exchanged

    def wrap(self, model: nn.Module) -> nn.Module:
        """What training calls. The model itself is moved and sharded in place, and keeps its names."""
        if self._compile_blocks:  # in place
            layers = list(_layers(model))
            # The blocks differ in constants, so each is compiled; inductor's cache serves equal kernels.
            limit: Any = torch._dynamo.config
            limit.recompile_limit = max(limit.recompile_limit, 4 * len(layers))  # in training and in evaluation
            for layer in layers:
                layer.compile()
        compiled: Any = torch.compile(model) if self._compile and not self._compile_blocks else model
        for message in HARMLESS:
            warnings.filterwarnings("ignore", message)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            wrapped: nn.Module = self._fabric.setup_module(compiled)
        return wrapped

    def eager(self) -> Any:
        """Inside, the model itself runs uncompiled, even if its blocks were compiled in place."""
        return torch.compiler.set_stance("force_eager") if self._compile_blocks else nullcontext()

    def on_main(self, function: Callable[[], T]) -> T:
        """The main process's result, in all processes. An error there is raised in all of them, so that none waits."""
        found: Any = None, None
        if self.is_main:
            try:
                found = function(), None
            except Exception as caught:
                found = None, caught
        value, error = self._fabric.broadcast(found)
        if error is not None:
            raise error
        return cast(T, value)

    def close(self) -> None:
        """Leave the process group, and remove Fabric's environment variables, which look like torchrun's."""
        if self._owns_group and dist.is_available() and dist.is_initialized():
            LEFT[:] = [dist.group.WORLD]
            dist.destroy_process_group()
        for name in SET_BY_FABRIC & (os.environ.keys() - self._environment.keys()):
            del os.environ[name]


def _fabric(strategy: str, precision: str, device: str, processes: int | None) -> Any:
    fabric = import_extra("lightning.fabric", "training runs on Lightning Fabric: pip install 'acutance[train]'")
    strategies = fabric.strategies
    for name in ("lightning.fabric", "lightning.fabric.utilities.rank_zero", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)  # otherwise it announces the precision and every process
    accelerator = distributed.device(device).partition(":")[0]
    local, nodes = processes or 1, 1
    if "LOCAL_WORLD_SIZE" in os.environ:  # from torchrun: processes on this machine, and on all
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        nodes = int(os.environ["WORLD_SIZE"]) // local
    elif processes is None and accelerator == "cuda" and strategy != "single":
        local = torch.cuda.device_count()
    chosen: Any = strategies.DDPStrategy() if strategy == "ddp" else "auto"
    if strategy == "fsdp":  # Fabric's own FSDPStrategy is FSDP1
        chosen = strategies.ModelParallelStrategy(_shard, data_parallel_size=local * nodes, tensor_parallel_size=1)
    casts: Any = "bf16-mixed" if precision == "bf16" else "32-true"
    return fabric.Fabric(accelerator=accelerator, devices=local, num_nodes=nodes, strategy=chosen, precision=casts)


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in STACKS and isinstance(module, nn.ModuleList):
            yield from module


def _shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """FSDP2: each layer by itself, then the rest."""
    from torch.distributed.fsdp import fully_shard

    over = mesh["data_parallel"]
    for layer in list(_layers(model)):
        fully_shard(layer, mesh=over)
    fully_shard(model, mesh=over)
    return model


def raise_on_all_ranks(function: Callable[[], T], gather: Callable[[Any], Sequence[str | None]] = gather) -> T:
    """Call a function that may fail on one rank only. All ranks raise then, so that none waits forever."""
    try:
        value = function()
    except Exception as error:
        gather(str(error))
        raise
    messages = gather(None)
    for rank, message in enumerate(messages):
        if message is not None:
            raise AcutanceError(f"process {rank} of {len(messages)} stopped: {message}")
    return value


@cache
def _torchrun_store() -> tuple[Any, int, int]:
    """Torchrun's store, rank and world size.

    The store is kept alive. It may live in rank 0, and the process group uses the same port: a rank that connects to
    the old store there would lose its connection when rank 0 closes it.
    """
    from torch.distributed.rendezvous import rendezvous

    return next(rendezvous("env://"))  # type: ignore[no-any-return]


def gather_by_torchrun(own: str | None) -> list[str | None]:
    """Like `gather`, before there is a process group: through torchrun's store."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or not dist.is_torchelastic_launched():
        return [own]
    from torch._C._distributed_c10d import PrefixStore

    store, rank, size = _torchrun_store()
    store = PrefixStore("acutance", store)
    store.set(str(rank), json.dumps(own))
    parts = [json.loads(store.get(str(other))) for other in range(size)]
    if store.add("readers", 1) == size:
        store.set("all have read", "")
    if rank == 0:  # the store may live in this process, which ends if a run is refused
        store.wait(["all have read"])
    return parts
