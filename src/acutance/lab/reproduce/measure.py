"""How targets are measured. This calls metrics, spectra and scores that are defined elsewhere."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from statistics import fmean

import torch

from acutance import sites
from acutance.explain import explain
from acutance.explain.weights import Norm
from acutance.lab.bench.floor import count_flops
from acutance.lab.bench.timing import Candidate, Pace, compare, inference_step
from acutance.lab.reproduce.run import RowModel, Session
from acutance.lab.reproduce.target import Line, Sheet
from acutance.lab.robustness import CORRUPTIONS, FGSM, PGD, evaluate, images_of, table_name
from acutance.lab.studies import norm_grid
from acutance.lab.studies.pictures import repeat_picture
from acutance.lab.tasks.classification import build_vit
from acutance.measure import measure
from acutance.measure.maps import attention_maps
from acutance.models import Segmenter

Read = Callable[[RowModel], Mapping[str, float]]
Measure = Callable[[Session], list[Sheet]]

COSINE = "token cosine, last layer"
EFFICIENCY_BATCH, EFFICIENCY_REPEATS = 8, 50
DOMINANCE: dict[Norm, str] = {"ignore": "", "fold": ", γ folded"}
CORRUPTED = {f"severity {level}": f"severity {level}" for level in range(1, 6)}
ATTACKS: dict[str, FGSM | PGD] = {"FGSM": FGSM(1.0), "PGD": PGD(1.0)}
ATTACKED = {column: attack.name for column, attack in ATTACKS.items()}
PUBLISHED_CORRUPTIONS = "CIFAR-100-C"  # a folder in the data folder, which is read if it is there
CORRUPTION_NAMES = tuple(CORRUPTIONS)


def table(*reads: Read, title: str = "", digits: int = 2) -> Measure:
    """One sheet with the numbers of all reads. Its columns are the measured names, then the only published ones."""

    def sheets(session: Session) -> list[Sheet]:
        lines = [session.line(row, reads) for row in session.target.rows]
        names = [name for line in lines for name in line.measured] + [name for line in lines for name in line.published]
        return [Sheet(title or session.target.title, list(dict.fromkeys(names)), lines, digits)]

    return sheets


def together(*measures: Measure) -> Measure:
    """The sheets of several measures."""
    return lambda session: [sheet for each in measures for sheet in each(session)]


def scores(columns: Mapping[str, str], split: str = "test", settings: tuple[str, ...] = ()) -> Read:
    """A run's scores by column. `settings` change how it is evaluated."""
    return lambda model: {column: model.scores(split, settings)[name] for column, name in columns.items()}


def by_layer(metric: str, split: str = "test") -> Read:
    """A metric after each block (of a Segmenter's encoder), with a column for each layer."""
    return lambda model: {f"layer {layer}": value for layer, value in _curve(model, metric, split).items()}


def at_last_layer(column: str, metric: str, split: str) -> Read:
    """A metric after the last block."""
    return lambda model: {column: list(_curve(model, metric, split).values())[-1]}


def mean_over_layers(metric: str, columns: Mapping[str, str]) -> Read:
    """A metric's mean over layers; each column has its own split."""
    return lambda model: {column: fmean(_curve(model, metric, split).values()) for column, split in columns.items()}


def _curve(model: RowModel, metric: str, split: str) -> dict[int, float]:
    part = "encoder" if isinstance(model.module, Segmenter) else None
    profile = measure(model.module, model.inputs(split), metrics=[metric], tap="block", part=part, progress=False)
    return {found.layer: found.mean for found in profile.select(metric)}


def ablation(session: Session) -> list[Sheet]:
    """Scores on the held-out slice, the difference from the first row at the same seeds, and the learnt λ̃ by layer."""
    base = session.target.rows[0].label
    read = scores({"top-1": "top1", "loss": "loss"}, "val"), at_last_layer(COSINE, "token_cosine", "val")
    (sheet,) = table(*read)(session)
    beside, first = f"top-1 beside {base}", sheet.lines[0].measured.get("top-1", {})
    lines = []
    for line in sheet.lines:
        pairs = line.measured.get("top-1", {}).items()
        difference = {seed: value - first[seed] for seed, value in pairs if seed in first}
        lines.append(replace(line, measured={**line.measured, beside: difference}))
    whole = replace(sheet, columns=["top-1", beside, "loss", COSINE], lines=lines)
    (learnt,) = table(_learnt_strengths, title="λ̃ after training", digits=3)(session)
    return [whole, replace(learnt, lines=[line for line in learnt.lines if line.measured])]


def _learnt_strengths(model: RowModel) -> dict[str, float]:
    """The mean over heads; layer 1 has none."""
    learnt = {site.layer: getattr(site.mitigation, "learnt_strength", None) for site in sites.find(model.module)}
    return {f"layer {at}": float(values.detach().mean()) for at, values in learnt.items() if values is not None}


def dominance(model: RowModel) -> dict[str, float]:
    """Which family dominates I + H⊗A, in percent of samples, layers and heads.

    The poster's H leaves out the norm's weight γ, so this one is compared with the published figures. The layer's own
    H includes it.
    """
    found: dict[str, float] = {}
    for norm, words in DOMINANCE.items():
        share = explain(model.module, model.inputs("test"), norm=norm, progress=False).share()
        found |= {f"μ = 1 dominates{words}": 100 * share.smoothing}
        found |= {f"another μ dominates{words}": 100 * share.sharpening}
    return found


def spectra(model: RowModel) -> dict[str, float]:
    """The eigenvalues of H: the share with a negative real part, the median, and a histogram for the last seed."""
    found = explain(model.module, progress=False)
    model.save_picture(found.plot("histogram"), "spectrum")
    negative = fmean(layer.negative_share for layer in found.layers)
    middle = fmean(layer.quantiles[2] for layer in found.layers)
    return {"negative real part, %": 100 * negative, "median of the real parts": middle}


def maps(model: RowModel) -> dict[str, float]:
    """Attention maps of one test image in the first, middle and last layer, as pictures."""
    depth = len(model.module.blocks)  # type: ignore[arg-type] # a ViT's
    image = next(iter(model.inputs("test")))[:1].to(model.session.device)
    layers = sorted({1, max(1, depth // 2), depth})  # 1, 6 and 12 of twelve
    model.save_picture(attention_maps(model.module, image, layers).plot(), "maps")
    return {}


def norms(session: Session) -> list[Sheet]:
    """One repeated layer with each norm, for three spectra of H."""
    grid = norm_grid()
    session.save_picture(repeat_picture(grid), "norms")
    lines = [
        Line(norm, {spectrum: {0: float(t.hfc_lfc[:, -1].mean())} for spectrum, t in curves.items()})
        for norm, curves in grid.items()
    ]
    return [Sheet("HFC/LFC at the end", list(lines[0].measured), lines, digits=4)]


def robustness(columns: Mapping[str, str]) -> Measure:
    """Accuracy on corrupted and attacked test images.

    `columns` maps a column to a name in `RobustnessTable.summary`. With corruptions, a second sheet lists each of them.
    """
    corrupted = any(name.startswith("severity") for name in columns.values())
    attacks = [attack for column, attack in ATTACKS.items() if column in columns]

    def read(model: RowModel) -> dict[str, float]:
        run, data_dir = model.run, model.session.data_dir
        published = None if data_dir is None else data_dir / PUBLISHED_CORRUPTIONS
        if published is None or not published.is_dir() or run.config.task.kind != "classification":
            published = None
        found = evaluate(
            model.module,
            images_of(run.config.task, "test"),
            corruptions=CORRUPTION_NAMES if corrupted else (),
            attacks=attacks,
            path=run.run.folder / table_name(corrupted_dir=published),  # shared with `acutance robustness`
            corrupted_dir=published,
            context={"name": run.label, "split": "test", "which": "last"},
        ).summary()
        return {**found, **{column: found[name] for column, name in columns.items()}}

    def sheets(session: Session) -> list[Sheet]:
        lines = [session.line(row, [read]) for row in session.target.rows]
        whole = Sheet(session.target.title, list(columns), lines)
        single = replace(whole, columns=CORRUPTION_NAMES).transposed("By corruption, mean over severities")
        return [whole, single] if corrupted else [whole]

    return sheets


def efficiency(model: RowModel) -> dict[str, float]:
    """Inference with the row's mitigation relative to inference without it, on random images; memory on a GPU only."""
    chosen, device = model.run.config.task.model, model.session.device
    torch.manual_seed(model.seed)
    images = torch.randn(EFFICIENCY_BATCH, chosen.in_chans, chosen.image_size, chosen.image_size, device=device)
    configs = replace(chosen, mitigation=None), chosen
    plain, steered = (build_vit(config, weights=None).to(device).eval() for config in configs)
    (products, pointwise), (more, more_pointwise) = (count_flops(each, images) for each in (plain, steered))
    term = more - products + more_pointwise - pointwise  # relative to products alone, as FLOPs are usually given
    steps = {"plain": partial(inference_step, plain, [images]), "steered": partial(inference_step, steered, [images])}
    candidates = [Candidate(name, make, baseline=name == "plain") for name, make in steps.items()]
    *_, (_, row) = compare(candidates, Pace(EFFICIENCY_REPEATS, steps=1, warm_up=1, refresh=0), device)
    found = {"time": row.get("ratio"), "memory": row.get("memory_ratio")}
    ratios = {name: float(ratio) for name, ratio in found.items() if ratio}
    return {"operations": (products + term) / products, **ratios}
