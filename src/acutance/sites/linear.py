"""What a projection multiplies by: its weight, or what an adapter such as LoRA makes of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from acutance.errors import NoSitesError
from acutance.sites.base import TOKENS_REMAIN
from acutance.wrappers import evaluating


def is_plain(module: nn.Module) -> bool:
    """Whether it multiplies by its `weight` and does nothing else but add a bias; what wraps a layer does more."""
    own = "forward" in vars(module)  # some replace the method of the layer itself
    return not own and (type(module).forward is nn.Linear.forward or is_conv1d(module))


def matrix_of(module: nn.Module) -> Tensor:
    """The matrix (out, in) that tokens are multiplied by.

    Of an adapter around a layer (LoRA and its kin, whose `weight` is often that of the layer alone) it is what comes
    out for the unit vectors, less what comes out for zero, in evaluation mode.
    """
    if is_plain(module):
        return _stored(module)
    zero = _zero_for(module)
    random = torch.randn(4, zero.shape[1], generator=torch.Generator().manual_seed(0)).to(zero)
    units = torch.eye(zero.shape[1]).to(zero)
    with evaluating(module):
        offset, rows = _through(module, zero), _through(module, units)
        expected = random @ (rows - offset) + offset
        off = torch.linalg.vector_norm(_through(module, random) - expected)
    if not off <= torch.finfo(random.dtype).eps ** 0.5 * torch.linalg.vector_norm(expected):
        raise _refusal(module, "what it does to tokens is not linear")
    return (rows - offset).T


def shape_of(module: nn.Module) -> tuple[int, int]:
    """The shape (out, in) of that matrix, which is not made for it."""
    if is_plain(module):
        rows, columns = _stored(module).shape
        return rows, columns
    zero = _zero_for(module)
    with evaluating(module):
        return _through(module, zero).shape[1], zero.shape[1]


def is_conv1d(module: nn.Module) -> bool:
    """GPT-2's linear layers store their weight the other way round; asked without importing transformers."""
    return any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)


def _stored(layer: nn.Module) -> Tensor:
    weight: Tensor = layer.weight  # type: ignore[assignment]
    return weight.T if is_conv1d(layer) else weight


def _zero_for(module: nn.Module) -> Tensor:
    """A token of zeros: the layer that is wrapped, or the adapter's first, takes what the whole takes."""
    layer = next((inside for inside in module.modules() if isinstance(inside, nn.Linear) or is_conv1d(inside)), None)
    if layer is None:
        raise _refusal(module, "no linear layer is inside it")
    return _stored(layer).detach().new_zeros(1, _stored(layer).shape[1])


def _through(module: nn.Module, x: Tensor) -> Tensor:
    """By its forward alone: hooks, such as our own, may change what comes out."""
    try:
        y = module.forward(x)
    except Exception as error:  # whatever somebody's module raises for what it does not take
        raise _refusal(module, f"it does not take tokens of shape {tuple(x.shape)} ({error})") from error
    if not isinstance(y, Tensor) or y.shape[:-1] != x.shape[:-1]:
        raise _refusal(module, "it does not give one vector a token")
    return y


def _refusal(module: nn.Module, reason: str) -> NoSitesError:
    return NoSitesError(
        f"a projection of the attention is a {type(module).__name__}, and {reason}, so it has no matrix to read: merge "
        f"an adapter into the layer it is around (with peft, merge_and_unload()). {TOKENS_REMAIN}"
    )
