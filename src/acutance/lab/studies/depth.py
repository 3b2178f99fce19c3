"""How smoothing grows with depth at random initialisation, up to 96 layers and beyond, on real digits.

At initialisation, a network of 12 layers is the beginning of one of 96, so one network per variant and seed is enough.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from acutance.errors import AcutanceError
from acutance.lab.data import digits
from acutance.lab.studies.pictures import depth_picture, save_study
from acutance.lab.studies.runs import merge
from acutance.measure import measure
from acutance.measure.profile import Profile
from acutance.measure.walk import track
from acutance.mitigations import parse
from acutance.models import ViT, vit_digits
from acutance.report.pictures import Figure
from acutance.report.tables import DataFrame, FittedTable, data_frame

Init = Literal["deit", "xavier"]
METRICS = ("hfc_lfc_spectral", "token_cosine", "singular_ratio")

# Options of the model, and the mitigation put into it once its weights are drawn.
VARIANTS: Mapping[str, tuple[Mapping[str, Any], str | None]] = {
    "Pre-LN (plain)": ({}, None),
    "Post-LN": ({"norm": "post"}, None),
    "NeuTRENO": ({}, "neutreno:0.6"),
    "LayerScale 0.1": ({"layer_scale": 0.1}, None),
    "ViT⁻": ({}, "eigen:negative"),
    "ViT⁺": ({}, "eigen:positive"),
}


@dataclass(frozen=True)
class DepthConfig:
    """DeiT-tiny's width on 8×8 digits: 16 patches and a class token."""

    depths: tuple[int, ...] = (12, 48, 96)
    inits: tuple[Init, ...] = ("deit", "xavier")  # σ = 0.02 everywhere; variance 2/(fan in + fan out)
    dim: int = 192
    heads: int = 3
    patch_size: int = 2
    samples: int = 32  # test images

    def __post_init__(self) -> None:
        if not self.depths or min(self.depths) < 1:
            raise AcutanceError(f"depths {self.depths}: name at least one, each 1 or more")
        if unknown := set(self.inits) - set(get_args(Init)):
            raise AcutanceError(f"unknown init {', '.join(sorted(unknown))}; known: {', '.join(get_args(Init))}")


@dataclass(frozen=True)
class DepthStudy:
    """Profiles of every initialisation and variant, one per seed."""

    config: DepthConfig
    runs: Mapping[tuple[str, str], Sequence[Profile]]

    def merged(self) -> dict[tuple[str, str], Profile]:
        """Mean over seeds per (init, variant); `std` is the spread over seeds, 0 for a single one."""
        return {key: merge(profiles) for key, profiles in self.runs.items()}

    def to_frame(self) -> DataFrame:
        """One row per init, variant, seed and layer (0 is the input); a column per metric, the mean over samples."""
        rows = [
            {"init": init, "variant": variant, "seed": seed, "layer": layer}
            | {name: float(profile[name][layer]) for name in METRICS}
            for (init, variant), profiles in self.runs.items()
            for seed, profile in enumerate(profiles)
            for layer in profile.layers(METRICS[0])
        ]
        return data_frame(rows)

    def summary(self) -> list[dict[str, Any]]:
        """One row per init, variant and depth (0 is the input), with every metric's mean and spread over seeds."""
        rows = []
        for ((init, variant), profile), depth in product(self.merged().items(), (0, *sorted(self.config.depths))):
            found = (r for name in METRICS for r in profile.select(name) if r.layer == depth)
            figures = {r.metric: {"mean": r.mean, "spread": r.std} for r in found}
            rows.append({"init": init, "variant": variant, "depth": depth, **figures})
        return rows

    def table(self) -> FittedTable:
        """‖HFC‖/‖LFC‖ at every requested depth, and the token cosine at the largest."""
        seeds, depths, rows = len(next(iter(self.runs.values()))), (0, *sorted(self.config.depths)), []
        for (init, variant), profile in self.merged().items():
            ratios = {r.layer: r for r in profile.select("hfc_lfc_spectral")}
            shown = {f"depth {n}": ratios[n] for n in depths}
            shown[f"cosine at {depths[-1]}"] = profile.select("token_cosine")[-1]
            texts = {name: f"{r.mean:.2g} ± {r.std:.0g}" for name, r in shown.items()}
            rows.append({"init": init, "variant": variant, **texts})
        caption = f"HFC/LFC (spectral norm, residual stream) at each depth; mean ± spread over {seeds} seeds"
        keys = ("init", "variant")
        return FittedTable("smoothing at random initialisation", rows, caption, keys=keys, left=keys)

    def picture(self) -> Figure:
        return depth_picture(self.to_frame(), self.config.depths)

    def save(self, folder: str | os.PathLike[str], *, context: Mapping[str, Any] | None = None) -> list[Path]:
        """Write depth.csv, depth.json, depth.png and depth.svg."""
        profiles = next(iter(self.runs.values()))
        body = {
            "config": asdict(self.config),
            "seeds": [profile.context.get("lab", {}).get("seed") for profile in profiles],
            "variants": {name: {**options, "mitigation": spec} for name, (options, spec) in VARIANTS.items()},
            "versions": profiles[0].context.get("versions"),
            **(context or {}),
            "summary": self.summary(),
        }
        return save_study(folder, "depth", self.to_frame(), body, self.picture())


def depth_study(
    config: DepthConfig | None = None,
    *,
    seeds: int = 3,
    folder: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> DepthStudy:
    """Build every variant at the largest depth, untrained, and measure it at every layer.

    Every variant has `seeds` networks. The seed decides all weights; the images are always the same. `folder` keeps
    each finished measurement in `profiles/`, and measurements of the same configuration are reused.
    """
    if seeds < 1:
        raise AcutanceError(f"the study needs at least one seed, got {seeds}")
    config = config or DepthConfig()
    _, test = digits()
    images = test.images[:: max(1, len(test) // config.samples)][: config.samples]
    runs: dict[tuple[str, str], list[Profile]] = {(i, v): [] for i in config.inits for v in VARIANTS}
    with ExitStack() as stack:
        for (init, variant), seed in track([*product(runs, range(seeds))], "networks" if progress else None, stack):
            # What a kept measurement must have been made with; of the depths only the largest matters.
            options, spec = VARIANTS[variant]
            size = {k: v for k, v in asdict(config).items() if k not in ("depths", "inits")}
            wanted = {"init": init, "variant": variant, "seed": seed, **size, "depth": max(config.depths), **options}
            wanted |= {"mitigation": spec, "torch": torch.__version__}
            name = variant.replace("⁻", " minus").replace("⁺", " plus").replace(" ", "-").lower()
            path = None if folder is None else Path(folder) / "profiles" / f"{name}-{init}-seed{seed}.json"
            profile = None
            if path is not None and path.is_file():
                with suppress(AcutanceError):  # a damaged file is measured again
                    profile = Profile.load(path)
            if profile is None or profile.context.get("lab") != wanted:
                model = random_network(config, variant, init, seed)
                measured = measure(model, [images], metrics=METRICS, progress=False)
                profile = Profile(measured.readings, {**measured.context, "lab": wanted})
                if path is not None:
                    profile.save(path)
            runs[init, variant].append(profile)
    return DepthStudy(config, runs)


def random_network(config: DepthConfig, variant: str, init: Init | str, seed: int) -> ViT:
    """One untrained network. All variants of a seed start from the same random weights."""
    options, spec = VARIANTS[variant]
    torch.manual_seed(seed)
    size = {"dim": config.dim, "depth": max(config.depths), "heads": config.heads, "patch_size": config.patch_size}
    model = vit_digits(**size, **options)
    if init == "xavier":
        draw_xavier(model)
    if spec is not None:  # last, since an eigen starts from the weights it finds
        model.install(parse(spec))
    return model


def draw_xavier(model: nn.Module) -> None:
    """Redraw the weights of all linear layers, with variance 2/(fan in + fan out)."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
