"""What torch wraps around a model to compile it or to train it in several processes, and reading it all the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch import nn

from acutance.errors import AcutanceError


def check_model(model: object) -> None:
    """A name is what the command line takes."""
    if not isinstance(model, nn.Module):
        raise AcutanceError(
            f"a model is a torch.nn.Module, not {model!r}: load it first, for example by "
            "acutance.io.loading.load_model('hf:owner/model').model"
        )


def bare_module(model: nn.Module) -> nn.Module:
    """The module inside torch.compile's and data parallelism's wrappers, whose forward would compile or synchronise."""
    check_model(model)
    parallel = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    while True:
        inner = model.module if isinstance(model, parallel) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP gathers the model's weights from all processes, so that none can run it without the others."""
    return any(_is_a(module, "FSDPModule", "FullyShardedDataParallel") for module in model.modules())


def refuse_sharded(model: nn.Module, reader: str) -> None:
    """Who reads weights needs them whole."""
    if is_sharded(model):
        raise AcutanceError(
            f"{reader} reads the weights, of which FSDP leaves each process a part: give it the model before it is "
            "sharded, or a plain one with the full state dict"
        )


@contextmanager
def shards_put_back(model: nn.Module) -> Iterator[None]:
    """FSDP2 frees gathered weights in the backward pass; after a reading, which has none, they would go stale."""
    try:
        yield
    finally:
        for module in model.modules():
            if _is_a(module, "FSDPModule"):
                cast(Any, module).reshard()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients, then every module's own mode again (some may have been frozen)."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False  # not by eval(), which some modules take as the order to merge their weights
        # Compiled code would not see the hooks.
        with shards_put_back(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in training:
            module.training = True


def _is_a(module: nn.Module, *names: str) -> bool:
    """Told by name: where torch comes without distributed there are no such classes to import."""
    cls: Any = type(module)
    return not _parents(cls).isdisjoint(names)


@cache
def _parents(cls: Any) -> frozenset[str]:
    return frozenset(parent.__name__ for parent in cls.__mro__)
