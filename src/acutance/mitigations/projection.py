"""W_Q, W_K, W_V and W_proj: rows of a module's weight, which are read, or made by a mitigation.

Rows are made by `torch.nn.utils.parametrize`: the module keeps its name for the weight, and rows that are not made stay
a parameter, `parametrizations.weight.original0`. A state dict has the whole weight under its usual name, as plain
numbers, so that files load without the mitigation; loading takes from it the rows that are parameters. Of a sharded
model it has the parameters as they are, since nobody can make a weight from parts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from acutance.errors import TOKENS_REMAIN, AcutanceError, NoSitesError

MERGE = "merge an adapter into the layer it is around (with peft, merge_and_unload())"
Rows = slice | Tensor | None  # None: all


@dataclass(frozen=True)
class Projection:
    """Rows of the matrix that a module multiplies tokens by: of a Linear, a Conv1D, or an adapter around one.

    The weight is read at every call, because training replaces what is stored.
    """

    module: Any  # an nn.Module
    rows: Rows = None
    weight: str = "weight"
    bias: tuple[Any, str, Rows] | None = None  # its module, name and rows, where it is not kept beside the weight

    @property
    def is_adapted(self) -> bool:
        """Whether the module does more than multiply by its weight and add a bias, as LoRA's layers do."""
        is_plain = type(self.module).forward is nn.Linear.forward or _is_conv1d(self.module)
        return self.weight == "weight" and ("forward" in vars(self.module) or not is_plain)

    def matrix(self) -> Tensor:
        """The matrix (rows, in) that tokens are multiplied by."""
        whole = _adapted(self.module) if self.is_adapted else _stored(self.module, self.weight)
        return whole if self.rows is None else whole[self.rows]

    def shape(self) -> tuple[int, ...]:
        """The shape (out, in) of all rows, without making an adapter's matrix."""
        if self.is_adapted:
            zero = _zero_for(self.module)
            return _through(self.module, zero).shape[1], zero.shape[1]
        return _stored(self.module, self.weight).shape

    def offset(self) -> Tensor | None:
        """The bias, (rows,); None where there is none."""
        module, name, rows = self.bias or (self.module, "bias", self.rows)
        bias = getattr(module, name, None)
        return None if not isinstance(bias, Tensor) else bias if rows is None else bias[rows]

    def refuse_parametrisation(self) -> None:
        """Raise if these rows cannot be parametrised, or something else does so already."""
        kind = type(self.module).__name__
        if self._made() is not None:
            raise AcutanceError("another mitigation makes W_V and W_proj already: choose one of the two")
        if self.is_adapted:
            raise AcutanceError(f"a projection is a {kind}, which does more than multiply by its weight: {MERGE}")
        if not isinstance(self.module._parameters.get(self.weight), nn.Parameter):
            raise AcutanceError(f"{self.weight} of a {kind} is not a parameter: remove what parametrises it first")

    def parametrise(self, owner: nn.Module, make: Callable[[], Tensor]) -> None:
        """Compute these rows by `make` from the owner's parameters; the module's other rows stay parameters."""
        made = MadeRows(self, owner, make)
        # unsafe: not made to be checked
        parametrize.register_parametrization(self.module, self.weight, made, unsafe=True)
        cls: Any = type(self.module)  # given by parametrize, to this module alone
        cls.__getstate__ = _refuse_pickling
        saving = self.module.register_state_dict_post_hook(partial(made.write))  # torch marks the hook
        made.hooks = [saving, self.module.register_load_state_dict_pre_hook(made.read)]

    def unparametrise(self, *, keep: bool) -> None:
        """Make the rows a parameter again, with their present values if `keep`, else with those from before."""
        module, name, made = self.module, self.weight, self._made()
        if made is None:  # done before something else was in the way
            return
        what, others = f"{name} of a {type(module).__name__}", list(module.parametrizations[name])[1:]
        if others:
            raise AcutanceError(f"{what} was parametrised once more by {type(others[0]).__name__}: take that off first")
        if made.is_sharded(module):
            advice = "take the mitigation out of a model that is not sharded, with the full state dict in it"
            raise AcutanceError(f"{what} is made from parameters of which FSDP leaves each process a part: {advice}")
        (parameter,), now = made.before, getattr(module, name).detach()
        with torch.no_grad():  # rows that stayed have what they have learnt since
            data = now if keep else made.whole(made.pick(parameter.data.to(now), True), *made.kept(module))
            parameter.data = data.clone(memory_format=torch.contiguous_format)
        for hook in made.hooks:
            hook.remove()
        cls = type(module)  # given by parametrize, which would change it; copies share it
        module.__class__ = type(cls.__name__, cls.__bases__, dict(vars(cls)))
        with torch.enable_grad():  # without, torch leaves a buffer of that name
            parametrize.remove_parametrizations(module, name)
        module._parameters[name] = parameter
        places = [place for place in made.places if place in module._parameters]
        module._parameters.update({place: module._parameters.pop(place) for place in places})

    def _made(self) -> "MadeRows | None":
        found = parametrize.is_parametrized(self.module, self.weight) and self.module.parametrizations[self.weight][0]
        return found if isinstance(found, MadeRows) else None


class Projections(NamedTuple):
    """The four projections of one attention; None for one that is not known."""

    query: Projection | None
    key: Projection | None
    value: Projection
    output: Projection


class MadeRows(nn.Module):
    """The parametrization: rows made by `make` beside those that stay."""

    hooks: list[Any]  # around the module's state dict

    def __init__(self, projection: Projection, owner: nn.Module, make: Callable[[], Tensor]) -> None:
        super().__init__()
        module, self.name = projection.module, projection.weight
        weight = module._parameters[self.name]
        self.make, self.dim = make, int(_is_conv1d(module))  # make has a bound method: a copied model gets its own
        self.owner = (owner,)  # whose parameters it is made from; in a tuple, since they are not this module's
        self.before = (weight,)  # the model's own parameter, which `unparametrise` gives back
        self.places = list(module._parameters)
        is_made = torch.zeros(weight.shape[self.dim], dtype=torch.bool, device="cpu")
        is_made[slice(None) if projection.rows is None else projection.rows] = True
        # The lengths of runs of rows, made and kept in turn. `make` returns rows in the weight's order.
        self.runs, self.starts_made = [len(list(run)) for _, run in groupby(is_made.tolist())], bool(is_made[0])

    def forward(self, *kept: Tensor) -> Tensor:
        return self.whole(self.make().mT if self.dim == 1 else self.make(), *kept)

    def whole(self, made: Tensor, *kept: Tensor) -> Tensor:
        """The whole weight from the rows that are made and those that stay, all as the module stores them."""
        if not kept:
            return made
        first, second = (made, *kept) if self.starts_made else (*kept, made)
        pieces: list[Any] = [None] * len(self.runs)
        pieces[::2], pieces[1::2] = first.split(self.runs[::2], self.dim), second.split(self.runs[1::2], self.dim)
        return torch.cat(pieces, self.dim)

    def pick(self, weight: Tensor, made: bool) -> Tensor:
        """The rows of a whole weight that are made, or those that stay."""
        return torch.cat(weight.split(self.runs, self.dim)[made != self.starts_made :: 2], self.dim)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, ...]:
        return (self.pick(weight, False),) if len(self.runs) > 1 else ()

    def kept(self, module: Any) -> list[nn.Parameter]:
        """The rows that stay, as one parameter or none."""
        return list(module.parametrizations[self.name].parameters(recurse=False))

    def sources(self, module: Any) -> list[nn.Parameter]:
        return [*self.owner[0].parameters(), *self.kept(module)]

    def is_sharded(self, module: Any) -> bool:
        """Whether FSDP has split what the weight is made from."""
        return any(hasattr(source, "full_tensor") for source in self.sources(module))

    @torch.no_grad()
    def write(self, module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        if self.is_sharded(module):
            return
        for key in [key for key in state if key.startswith(f"{prefix}parametrizations.{self.name}.")]:
            del state[key]
        is_meta = any(source.is_meta for source in self.sources(module))
        whole = torch.empty_like(self.before[0], device="meta") if is_meta else getattr(module, self.name)
        state[prefix + self.name] = whole.detach().clone(memory_format=torch.contiguous_format)

    def read(
        self, _module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any, _strict: bool, *lists: list[str]
    ) -> None:
        whole, shape = state.pop(prefix + self.name, None), self.before[0].shape
        if whole is not None and whole.shape != shape:
            lists[-1].append(f"size mismatch for {prefix}{self.name}: {tuple(whole.shape)} for {tuple(shape)}")
        elif whole is not None:
            for i, kept in enumerate(self.right_inverse(whole)):
                state[f"{prefix}parametrizations.{self.name}.original{i}"] = kept


def weight_with(module: Any, rows: Tensor) -> Tensor:
    """The whole weight of a linear layer with the rows that a mitigation would make."""
    made = module.parametrizations["weight"][0]
    return made.whole(rows, *made.kept(module))  # type: ignore[no-any-return]


def _refuse_pickling(module: nn.Module) -> Any:
    """Replaces torch's refusal, which does not name our verbs."""
    kind = type(module).__bases__[0].__name__
    raise AcutanceError(f"a mitigation makes a {kind}'s weight: use acutance.save, or pickle acutance.fold(model)")


def _is_conv1d(module: nn.Module) -> bool:
    """GPT-2's linear layers store their weight the other way round; asked without importing transformers."""
    return any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)


def _stored(module: nn.Module, name: str = "weight") -> Tensor:
    weight: Tensor = getattr(module, name)
    return weight.T if _is_conv1d(module) else weight


def _adapted(module: nn.Module) -> Tensor:
    """The outputs for unit vectors minus that for zero: an adapter's `weight` is often the wrapped layer's alone."""
    zero = _zero_for(module)
    width = zero.shape[1]
    random = torch.randn(4, width, generator=torch.Generator().manual_seed(0)).to(zero)
    offset, rows, found = _through(module, torch.cat([zero, torch.eye(width).to(zero), random])).split([1, width, 4])
    matrix: Tensor = rows - offset
    expected = random @ matrix + offset
    if not (found - expected).norm() <= torch.finfo(random.dtype).eps ** 0.5 * expected.norm():
        raise _refusal(module, "what it does to tokens is not linear")
    return matrix.T


def _zero_for(module: nn.Module) -> Tensor:
    """A token of zeros, as wide as the input of the wrapped layer, or else of the adapter's first."""
    layer = next((inside for inside in module.modules() if isinstance(inside, nn.Linear) or _is_conv1d(inside)), None)
    if layer is None:
        raise _refusal(module, "no linear layer is inside it")
    return _stored(layer).detach().new_zeros(1, _stored(layer).shape[1])


def _through(module: nn.Module, x: Tensor) -> Tensor:
    """Run its forward alone in evaluation mode: hooks, such as our own, may change the output."""
    training = [part for part in module.modules() if part.training]
    try:
        for part in training:
            part.training = False
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            y = module.forward(x)
    except Exception as error:  # a module may raise anything for inputs that it does not take
        raise _refusal(module, f"it does not take tokens of shape {tuple(x.shape)} ({error})") from error
    finally:
        for part in training:
            part.training = True
    if not isinstance(y, Tensor) or y.shape[:-1] != x.shape[:-1]:
        raise _refusal(module, "it does not give one vector a token")
    return y


def _refusal(module: nn.Module, reason: str) -> NoSitesError:
    kind = type(module).__name__
    return NoSitesError(f"a projection is a {kind}, and {reason}, so it has no matrix: {MERGE}. {TOKENS_REMAIN}")
