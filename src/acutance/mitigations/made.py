"""A weight of which a mitigation makes some rows, or all, by `torch.nn.utils.parametrize`.

The module keeps its name for the weight. Rows that are not made stay a parameter, `parametrizations.weight.original0`.
A state dict has the whole weight under its usual name, as plain numbers, so that files load without the mitigation;
loading takes from it the rows that are parameters. Of a sharded model it has the parameters as they are: nobody can
make a weight from parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from acutance.errors import AcutanceError

Rows = slice | Tensor | None  # None: all


@dataclass(frozen=True)
class Projection:
    """W_V or W_proj of one attention: some rows of a linear layer's weight.

    The weight is read at every call, because training replaces what is stored.
    """

    module: nn.Module
    rows: Rows = None
    weight: str = "weight"
    bias: str = "bias"
    bias_rows: Rows = None  # where they differ from the weight's
    bias_module: nn.Module | None = None  # where the bias is kept in another module

    def matrix(self) -> Tensor:
        """The matrix that tokens are multiplied by, (rows, in)."""
        whole: Tensor = getattr(self.module, self.weight)
        return whole if self.rows is None else whole[self.rows]

    def offset(self) -> Tensor | None:
        """The bias, (rows,); None where there is none."""
        bias = getattr(self.bias_module or self.module, self.bias, None)
        rows = self.rows if self.bias_rows is None else self.bias_rows
        return None if not isinstance(bias, Tensor) else bias if rows is None else bias[rows]

    def refuse_parametrisation(self) -> None:
        """Raise where these rows are made by something else already."""
        if made_of(self.module, self.weight) is not None:
            raise AcutanceError("another mitigation makes W_V and W_proj already: choose one of the two")
        if not isinstance(self.module._parameters.get(self.weight), nn.Parameter):
            raise AcutanceError(
                f"{self.weight} of a {type(self.module).__name__} is not a parameter: remove the parametrization or "
                "weight norm that makes it first"
            )

    def parametrise(self, owner: nn.Module, make: Callable[[], Tensor]) -> None:
        """Compute these rows by `make`, from the owner's parameters; the module's other rows stay parameters."""
        put_on(self.module, self.weight, self.rows, 0, owner, make)

    def unparametrise(self, *, keep: bool) -> None:
        """Make the rows a parameter again: with their present values if `keep`, else with those from before."""
        take_off(self.module, self.weight, keep=keep)


class MadeRows(nn.Module):
    """The parametrization: rows made by `make` beside those that stay."""

    like: Tensor
    places: list[str]  # the module's parameters in their order
    hooks: list[Any]  # around its state dict

    def __init__(self, make: Callable[[], Tensor], owner: nn.Module, weight: nn.Parameter, rows: Rows, dim: int):
        super().__init__()
        self.make, self.dim = make, dim  # a bound method: a copied model gets its own
        self.owner = (owner,)  # whose parameters it is made from; in a tuple, since they are not this module's
        self.before = (weight,)  # the model's own parameter, which `take_off` gives back
        every = torch.arange(weight.shape[dim], device="cpu")
        made = every if rows is None else every[rows.cpu() if isinstance(rows, Tensor) else rows]
        self.kept = every[~torch.isin(every, made)]
        order = torch.cat([self.kept, made]).argsort()
        self.order = None if order.equal(every) else order  # no buffer: `to_empty` would empty it
        self.register_buffer("like", weight.detach().new_empty(0), persistent=False)  # where the model is, its dtype
        self._follow()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._follow()
        return self

    def _follow(self) -> None:
        if self.order is not None and not self.like.is_meta:
            self.order = self.order.to(self.like.device)

    def forward(self, *kept: Tensor) -> Tensor:
        """The whole weight, as the module stores it."""
        return self.whole(self.make(), *kept)

    def whole(self, made: Tensor, *kept: Tensor) -> Tensor:
        """The same with rows that are made already."""
        made = made.mT if self.dim == 1 else made
        if not kept:
            return made
        joint = torch.cat([*kept, made], self.dim)
        return joint if self.order is None else joint.index_select(self.dim, self.order.to(joint.device))

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, ...]:
        """The rows that stay parameters."""
        return (weight.index_select(self.dim, self.kept.to(weight.device)),) if len(self.kept) else ()


def put_on(module: nn.Module, name: str, rows: Rows, dim: int, owner: nn.Module, make: Callable[[], Tensor]) -> None:
    """Let `make` give these rows of the module's weight from now on; rows are counted along `dim`."""
    made = MadeRows(make, owner, module._parameters[name], rows, dim)  # type: ignore[arg-type]
    places = list(module._parameters)
    parametrize.register_parametrization(module, name, made, unsafe=True)  # unsafe: not made to be checked
    saving = module.register_state_dict_post_hook(partial(_write, name=name))
    loading = module.register_load_state_dict_pre_hook(partial(_read, name=name))
    made.places, made.hooks = places, [saving, loading]


def take_off(module: nn.Module, name: str, *, keep: bool) -> None:
    """Make the weight a parameter again: with what is made now if `keep`, else with what was there before."""
    if made_of(module, name) is None:  # done before something else was in the way
        return
    made, *others = _listed(module, name)
    if others:
        raise AcutanceError(
            f"{name} of a {type(module).__name__} was parametrised once more by {type(others[0]).__name__}: take that "
            "off first"
        )
    if _is_sharded(module, name):
        raise AcutanceError(
            f"{name} of a {type(module).__name__} is made from parameters of which FSDP leaves each process a part: "
            "take the mitigation out of a model that is not sharded, with the full state dict in it"
        )
    parameter = _as_it_is(module, name) if keep else _as_it_was(module, name)
    for hook in made.hooks:
        hook.remove()
    _leave_class(module, name)
    module._parameters[name] = parameter
    places = [place for place in made.places if place in module._parameters]
    module._parameters.update({place: module._parameters.pop(place) for place in places})


def made_of(module: nn.Module, name: str = "weight") -> MadeRows | None:
    """What makes this weight, if a mitigation does."""
    if not parametrize.is_parametrized(module, name):
        return None
    found = _listed(module, name)[0]
    return found if isinstance(found, MadeRows) else None


def weight_with(module: nn.Module, rows: Tensor) -> Tensor:
    """The module's whole weight, given the rows that would be made."""
    made = made_of(module)
    assert made is not None, "asked only where a mitigation makes weights"
    return made.whole(rows, *_originals(module, "weight"))


def _listed(module: Any, name: str) -> Any:
    return module.parametrizations[name]


def _originals(module: nn.Module, name: str) -> list[nn.Parameter]:
    """The rows that stay, as one parameter or none."""
    return list(_listed(module, name).parameters(recurse=False))


def _sources(module: nn.Module, name: str) -> list[nn.Parameter]:
    """All that the weight is made from."""
    made = made_of(module, name)
    assert made is not None
    return [*made.owner[0].parameters(), *_originals(module, name)]


def _is_sharded(module: nn.Module, name: str) -> bool:
    return any(hasattr(source, "full_tensor") for source in _sources(module, name))


@torch.no_grad()
def _as_it_is(module: nn.Module, name: str) -> nn.Parameter:
    parameter: nn.Parameter = _listed(module, name)[0].before[0]
    parameter.data = getattr(module, name).detach().clone(memory_format=torch.contiguous_format)
    return parameter


@torch.no_grad()
def _as_it_was(module: nn.Module, name: str) -> nn.Parameter:
    """Rows that stayed parameters have what they have learnt since."""
    made = made_of(module, name)
    assert made is not None
    (parameter,) = made.before
    parameter.data = parameter.data.to(made.like)
    for kept in _originals(module, name):
        parameter.data.index_copy_(made.dim, made.kept.to(kept.device), kept.detach())
    return parameter


def _leave_class(module: nn.Module, name: str) -> None:
    """Back from the class that parametrize made; copies of the module have it too, so it is left as it is."""
    cls: Any = type(module)
    listed: Any = module.parametrizations
    del listed[name]
    if len(listed) == 0:
        del module.parametrizations
        module.__class__ = cls.__bases__[0]
    else:
        module.__class__ = type(cls.__name__, cls.__bases__, {k: v for k, v in vars(cls).items() if k != name})


@torch.no_grad()
def _write(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any, *, name: str) -> None:
    made = made_of(module, name)
    assert made is not None
    if _is_sharded(module, name):
        return
    for key in [key for key in state if key.startswith(f"{prefix}parametrizations.{name}.")]:
        del state[key]
    is_meta = any(source.is_meta for source in _sources(module, name))
    whole = torch.empty_like(made.before[0], device="meta") if is_meta else getattr(module, name)
    state[prefix + name] = whole.detach().clone(memory_format=torch.contiguous_format)


def _read(
    module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any, _strict: bool, *lists: list[str], name: str
) -> None:
    """The rows that are made follow from the mitigation's parameters, which are loaded as such."""
    whole, made = state.pop(prefix + name, None), made_of(module, name)
    assert made is not None
    if whole is None:
        return
    if whole.shape != made.before[0].shape:
        shapes = f"{tuple(whole.shape)} for {tuple(made.before[0].shape)}"
        lists[-1].append(f"size mismatch for {prefix}{name}: {shapes}")
    elif len(made.kept):
        kept = whole.index_select(made.dim, made.kept.to(whole.device))
        state[f"{prefix}parametrizations.{name}.original0"] = kept
