"""sweep: every remedy in a copy of one pretrained model, measured before and after the same short fine-tune."""

import copy
import os
import re
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from math import isfinite
from typing import Any, Literal

import torch
from torch import nn

from acutance import sites
from acutance.diagnose.quality import Objective, labels_of
from acutance.errors import AcutanceError, AcutanceWarning, first_line
from acutance.lab.robustness.evaluate import digest_of, weights_digest
from acutance.lab.sweep.fine_tune import FineTune, fine_tune
from acutance.lab.sweep.table import CONTROL, Reading, Sweep, Trial
from acutance.measure import measure
from acutance.measure.samples import arguments_of, fed_of, refuse_single
from acutance.measure.walk import describe, feed, track
from acutance.mitigations.base import REGISTRY, Mitigation, parse
from acutance.sites.mitigate import mitigate
from acutance.sites.structure import check_model, evaluating

FROM_IDENTITY = {"learn": "head", "gated": "true", "diagonal": "true"}  # options that make a constant remedy learn
TIMED, TIMED_S = 2, 1.0  # forward passes at least, and seconds; the fastest counts


def sweep(
    model: nn.Module,
    batches: Iterable[Any],
    remedies: str | Sequence[str | Mitigation] = "all",
    *,
    quality: Any = None,
    strengths: Sequence[float] = (),
    fine_tune: int = 0,
    train: Literal["all", "remedy"] = "all",
    lr: float = 1e-4,
    seed: int = 0,
    part: str | None = None,
    path: str | os.PathLike[str] | None = None,
    progress: bool = True,
    context: Mapping[str, Any] | None = None,
) -> Sweep:
    """Put each remedy into a copy of a pretrained model; measure smoothness and quality before and after a fine-tune.

    Args:
        model: any model that `mitigate` takes, without a mitigation. It stays as it is.
        batches: as `measure` takes them, with labels where accuracy is wanted. With a fine-tune
            the first half trains and the rest evaluates.
        remedies: "all", or names and specs such as `["gate", "neutreno:0.4,learn=head"]`.
        quality: the headline: a name such as "accuracy", a function of (model, batch), or its place `module:function`.
        strengths: a row for each, of remedies with a strength that are given by name; also learnt where that is known.
        fine_tune: steps of AdamW, on all weights or (`train`) only the remedy's parameters, at the peak rate `lr`; a
            remedy's own parameters learn ten times as fast. The control is fine-tuned without a remedy.
        part: path of the submodule to change, where a model has several stacks of layers.
        path: a JSON file, written after each remedy. Remedies that it has already are not tried again.
        context: more for the result's context, such as the data's description.
    """
    how, specs = FineTune(fine_tune, train, lr, seed), specs_of(remedies, strengths)
    given = {remedy.spec: remedy for remedy in remedies if isinstance(remedy, Mitigation)}  # of no register, perhaps
    refuse_single(batches)
    batches = batches if isinstance(batches, Sequence) else list(batches)  # a DataLoader that shuffles, too
    check_model(model)
    if (carried := sites.mitigation_spec(sites.part_of(model, part))) is not None:
        raise AcutanceError(f"the model carries {carried!r} already: sweep a model without a mitigation")
    trained, held, objective, lowered = how.prepare(model, batches, quality)
    about = describe(model, part) | dict(context or {})
    about |= {"seed": seed, "weights": weights_digest(model), "fine_tune": asdict(how)}
    about["quality"], ends = list(objective.names) if objective else [], (batches[0], batches[-1])
    about["samples"] = digest_of(
        x for batch in ends for x in (*arguments_of(fed_of(batch)), labels_of(batch)) if x is not None
    )
    about["batches"] = [len(trained), len(held)]
    about["split"] = f"{len(trained)} batches train and {len(held)} others evaluate" if how.steps else "no fine-tune"
    table = Sweep((), about).resumed(path, "is another sweep")
    missing = [spec for spec in specs if spec not in [trial.spec for trial in table.trials]]
    bench = _Bench(model, trained, held, objective, lowered, how, part)
    with ExitStack() as stack:
        for spec in track(missing, "sweep" if progress else None, stack):
            table = replace(table, trials=(*table.trials, bench.trial(spec, given.get(spec, spec))))
            if path is not None:
                table.save(path)
    return replace(table, trials=tuple(table[spec] for spec in specs))


def specs_of(remedies: str | Sequence[str | Mitigation], strengths: Sequence[float] = ()) -> list[str]:
    """The specs to try, the control first; unknown names, options and values are refused."""
    if isinstance(remedies, str):
        # A comma separates remedies, unless an option follows it: neutreno:0.4,learn=head,featscale.
        remedies = re.split(r",\s*(?![^,:+]*=)", remedies)
    found = [CONTROL]
    for remedy in remedies:
        for name in sorted(REGISTRY) if remedy == "all" else [remedy]:
            found += [name.spec] if isinstance(name, Mitigation) else _variants(name.strip(), strengths)
    if bad := [x for x in strengths if not isfinite(x)]:
        raise AcutanceError(f"strength {bad[0]} is no finite number")
    return list(dict.fromkeys(found))


def _variants(name: str, strengths: Sequence[float]) -> list[str]:
    if re.search(r"[:+]", name):
        return [parse(name).spec]
    if (cls := REGISTRY.get(name.lower())) is None:
        close = get_close_matches(name.lower(), REGISTRY, n=1)
        hint = f"; did you mean {close[0]}" if close else ""
        raise AcutanceError(f"unknown remedy {name!r}{hint}; there are: {', '.join(sorted(REGISTRY))}, or all")
    found = [f"{name}:{x}" for x in strengths] if "strength" in cls.options() and strengths else [name]
    gentle = from_identity(cls())
    return [parse(spec).spec for spec in [*found, *([f"{name}:{gentle}"] if gentle else [])]]


def from_identity(remedy: Mitigation) -> str | None:
    """The option with which a remedy that changes trained weights' work at once would start at the identity."""
    unset = [key for key in FROM_IDENTITY if key in remedy.options() and getattr(remedy, key) in (None, False)]
    return f"{unset[0]}={FROM_IDENTITY[unset[0]]}" if unset else None


@dataclass(frozen=True)
class _Bench:
    """One model and its data, on which remedies are tried."""

    model: nn.Module
    trained: Sequence[Any]
    held: Sequence[Any]
    objective: Objective | None
    lowered: Objective | None
    how: FineTune
    part: str | None

    def trial(self, spec: str, remedy: str | Mitigation) -> Trial:
        """What a remedy does; whatever keeps it from working is the reason in its row."""
        try:
            return self._tried(spec, remedy)
        except Exception as error:  # whatever a model raises that the remedy does not suit
            if spec == CONTROL:
                raise
            named = "" if isinstance(error, AcutanceError) else f"{type(error).__name__}: "
            return Trial(spec, reason=named + first_line(error))

    def _tried(self, spec: str, remedy: str | Mitigation) -> Trial:
        model, handle = copy.deepcopy(self.model), None
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if spec != CONTROL:
                handle = mitigate(model, remedy, part=self.part)
            moved = f"H moved by {max(handle.distances):.0%} at most" if handle and handle.distances else ""
            added = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in self.model.parameters())
            start = end = self._read(model)
            if self.lowered is not None:
                fine_tune(model, self.trained, self.lowered, self.how, handle)
                end = self._read(model)
            ratio, memory = (1.0, None) if handle is None else self._cost(model)
        told = [str(one.message) for one in said if issubclass(one.category, AcutanceWarning)]
        return Trial(spec, "", "; ".join(filter(None, [moved, *dict.fromkeys(told)])), added, start, end, ratio, memory)

    def _read(self, model: nn.Module) -> Reading:
        qualities = () if self.objective is None else tuple(self.objective.measure(model, self.held))
        profile = measure(model, self.held, metrics=["token_cosine"], part=self.part, progress=False)
        return Reading(qualities, float(profile["token_cosine"][-1]))

    def _cost(self, model: nn.Module) -> tuple[float, float | None]:
        """Time and peak memory of a forward pass, as ratios to the model without the remedy, in turns."""
        found: dict[nn.Module, list[tuple[float, float]]] = {self.model: [], model: []}
        began = time.perf_counter()
        while len(found[model]) < TIMED or time.perf_counter() - began < TIMED_S:
            for one, costs in found.items():
                costs.append(_forward_cost(one, self.held[0]))
        (plain, peak), (own, own_peak) = (tuple(map(min, zip(*costs, strict=True))) for costs in found.values())
        return own / plain, own_peak / peak if peak else None


def _forward_cost(model: nn.Module, batch: Any) -> tuple[float, float]:
    """Seconds (on a CPU of its cores, which others may use too) and, on a GPU, the bytes needed beside the weights."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        began = time.process_time()
        with evaluating(model):
            feed(model, batch)
        return time.process_time() - began, 0.0
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    with evaluating(model):
        feed(model, batch)
    torch.cuda.synchronize(device)
    return time.perf_counter() - began, float(torch.cuda.max_memory_allocated(device) - before)
