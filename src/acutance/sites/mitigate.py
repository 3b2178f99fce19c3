"""mitigate: put a mitigation into a model in place, and take it out again."""

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from acutance import sites
from acutance.errors import AcutanceError, warn
from acutance.mitigations import Mitigation, as_mitigation
from acutance.mitigations.base import parts_of
from acutance.sites.structure import check_model, is_sharded
from acutance.sites.transformers import note


class Handle(sites.Undo):
    """A mitigation in a model; `remove()`, or leaving a with block, restores the model exactly.

    `layers` are those that it changes, or can learn to change. `distances` are ‖H − H₀‖/‖H₀‖ per layer, of mitigations
    that replace the weights.
    """

    def __init__(self, spec: str, undo: Callable[[], None], installed: Mapping[int, Mitigation]):
        super().__init__(undo)
        self.spec = spec
        self.layers = tuple(layer for layer, built in installed.items() if any(map(_acts, parts_of(built))))
        self._parameters = [parameter for built in installed.values() for parameter in built.parameters()]
        parts = [part for built in installed.values() for part in parts_of(built)]
        self.distances = tuple(part.distance for part in parts if part.distance is not None)

    def parameter_groups(self, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """The mitigation's own parameters for `optimiser.add_param_group`, of an optimiser that was made before.

        They start at the identity. By default no weight decay pulls them elsewhere.
        """
        params = list(self._parameters)
        return [{"params": params, "lr": lr, "weight_decay": weight_decay}] if params else []

    def __repr__(self) -> str:
        state = "removed" if self._undo is None else "active"
        moved = f", H moved by {', '.join(f'{d:.0%}' for d in self.distances)}" if self.distances else ""
        return f"<{self.spec} in layers {', '.join(map(str, self.layers)) or 'none'}{moved}, {state}>"


def _acts(part: Mitigation) -> bool:
    """Whether it does something where it was built: in layer 1 there are no earlier values to differ from."""
    is_first = part.shape is not None and part.shape.layer == 1
    return not part.is_idle and not (is_first and {"first_values", "previous_values"} & {*part.requires})


def mitigate(
    model: nn.Module, mitigation: Mitigation | str, layers: Sequence[int] | None = None, part: str | None = None
) -> Handle:
    """Put a mitigation into a trained model, in place.

    Learnt parameters start at the identity, so only constants such as NeuTRENO's λ̃ change the output before
    training. The exception is `Eigen`, which replaces W_V and W_proj by the closest it admits; the handle's
    `distances` tell how far that is. Make the optimiser afterwards, so that it sees the new parameters.

    Args:
        model: any model `acutance.sites.find` knows.
        mitigation: a `Mitigation` or its spec. In a pretrained model start at the identity, `neutreno:0.6,learn=head`,
            and fine-tune: a constant strength such as `neutreno:0.6` harms trained weights at once.
        layers: layer numbers, 1 being the first; all by default.
        part: path of the submodule to change, where a model has several stacks of layers, e.g. `model.encoder`.
    """
    _refuse_wrapped(model)
    found = sites.find(sites.part_of(model, part))
    _refuse_second(found)
    wanted = _wanted(layers, len(found))
    chosen = as_mitigation(mitigation)
    if chosen.overrides("parametrise"):
        _refuse_shared(model, [site for site in found if site.layer in wanted])
    undo = _install(model, [(site, chosen) for site in found if site.layer in wanted], pretrained=True)
    handle = Handle(chosen.spec, undo, {site.layer: site.mitigation for site in found if site.mitigation is not None})
    if chosen.is_idle:
        warn(f"{chosen.spec} changes nothing: give it a strength other than 0")
    elif wanted == [1] and "first_values" in chosen.requires:
        advice = "Name later layers" if len(found) > 1 else "The model has no other attention layer"
        warn(f"{chosen.spec} in layer 1 alone: v⁰ is that layer's own v, so v⁰ − v changes nothing there. {advice}")
    if handle._parameters and _has_optimiser(model):
        warn(
            f"an optimiser of this model was made before, and does not know the {len(handle._parameters)} new "
            f"parameters of {chosen.spec}: give it handle.parameter_groups(lr), or make it after mitigate"
        )
    return handle


def reinstate(model: nn.Module, record: Mapping[str, str]) -> None:
    """Put back what `sites.record` noted of a model into another one like it."""
    found = sites.all_sites(model)
    unknown = sorted(record.keys() - found.keys())
    if unknown:
        raise AcutanceError(
            f"the record has a mitigation for {unknown[0]!r}, which this {type(model).__name__} does not have; its "
            f"attention is in {', '.join(list(found)[:3])}… Load into the kind of model that was saved"
        )
    _refuse_second(list(found.values()))
    # The parameters and the weights come from a file.
    _install(model, [(found[name], as_mitigation(spec)) for name, spec in record.items()], pretrained=False)


def _install(
    model: nn.Module, chosen: Sequence[tuple[sites.AttentionSite, Mitigation]], *, pretrained: bool
) -> Callable[[], None]:
    """Build each mitigation for its layer and put it there, all or none; the returned function takes them out.

    It is a partial of objects, no closure: a copy of the handle made together with the model belongs to the copy.
    """
    installed: list[sites.AttentionSite] = []
    try:
        for site, mitigation in chosen:
            like = next(site.attention.parameters())
            built = mitigation.for_layer(site.shape(pretrained=pretrained)).to(device=like.device, dtype=like.dtype)
            site.install(built.train(site.attention.training))
            installed.append(site)
    except BaseException:
        _take_out(model, installed)
        raise
    note(model)
    return partial(_take_out, model, installed)


def _take_out(model: nn.Module, installed: list[sites.AttentionSite]) -> None:
    while installed:
        installed[-1].uninstall()
        installed.pop()  # not before: what is in the way can be taken away, and this tried again
    note(model)


def _refuse_wrapped(model: nn.Module) -> None:
    check_model(model)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise AcutanceError("gradients of parameters added now would not be synchronised: mitigate, then wrap in DDP")
    if is_sharded(model):
        raise AcutanceError("parameters added now would not be sharded: mitigate, then fully_shard")
    if any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in model.modules()):
        raise AcutanceError("compiled code would not see the mitigation: mitigate, then torch.compile")


def _has_optimiser(model: nn.Module) -> bool:
    """Whether some optimiser trains a parameter of the model; only the garbage collector knows."""
    own = {id(parameter) for parameter in model.parameters()}
    made = (found for found in gc.get_objects() if issubclass(type(found), torch.optim.Optimizer))
    return any(id(p) in own for one in made for group in one.param_groups for p in group["params"])


def _refuse_shared(model: nn.Module, found: Sequence[sites.AttentionSite]) -> None:
    """A weight that another module has too would no longer be one."""
    holders: dict[object, list[str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            holders.setdefault(parameter.untyped_storage()._cdata, []).append(f"{path}.{name}")
    for site in found:
        for projection in site.projections()[2:]:
            weight = projection.module._parameters.get(projection.weight)
            names = [] if weight is None else holders.get(weight.untyped_storage()._cdata, [])
            if len(names) > 1:
                raise AcutanceError(
                    f"{names[0]} and {names[1]} are one parameter, or share its memory: untie them first"
                )


def _wanted(layers: Sequence[int] | None, depth: int) -> list[int]:
    if layers is None:
        return list(range(1, depth + 1))
    if isinstance(layers, (int, float, str)):
        raise AcutanceError(f"layers are a list of numbers, not {layers!r}: write layers=[{layers}]")
    if not layers or not all(type(layer) is int and 1 <= layer <= depth for layer in layers):
        raise AcutanceError(f"layers {list(layers)}: name at least one layer by whole numbers from 1 to {depth}")
    return sorted(set(layers))


def _refuse_second(found: Sequence[sites.AttentionSite]) -> None:
    carried = next((site.mitigation for site in found if site.mitigation is not None), None)
    if carried is None:
        return
    origin, advice = "constructed", "build the model without it first"
    if carried.shape is not None and carried.shape.pretrained:
        origin, advice = "mitigated", "call remove() on its handle first"
    raise AcutanceError(
        f"the model was {origin} with {carried.spec!r} already: {advice}, or combine the two as 'one+other'"
    )
