"""Every training behind the tables and figures, by name. A finished one serves all targets that need it."""

from __future__ import annotations

from collections.abc import Mapping

from acutance.errors import AcutanceError
from acutance.lab.reproduce.target import Training

STRENGTHS = (0.001, 0.01, 0.1, 0.3, 0.6, 1.0, 3.0, 10.0, 100.0)  # λ̃ of the ablation, both ends included
LEARNT = ("layer", "head")  # what has a λ̃ of its own where it is learnt, from 0.6
FRACTIONS = (1.0, 0.5, 0.1)  # of CIFAR-100
SPECTRA = {"": None, "-plus": "eigen:positive", "-minus": "eigen:negative"}  # ViT-Ti, ViT-Ti⁺, ViT-Ti⁻
WHOLE = "task.train_on=all"  # for a result nothing is chosen, so the held-out slice is trained on too


def mitigated(spec: str) -> str:
    """The field that puts a mitigation in."""
    return f"task.model.mitigation={spec}"


NEUTRENO, FEATSCALE, BOTH = mitigated("neutreno:0.6"), mitigated("featscale"), mitigated("neutreno:0.6+featscale")


def _cifar100(spec: str | None, fraction: float = 1.0) -> Training:
    part = () if fraction == 1 else (f"task.fraction={fraction}",)
    steered = () if spec is None else (mitigated(spec), "loop.graph=false")  # whose QR the host waits for
    return Training("cifar100", (WHOLE, *part, *steered))


def _ablation(recipe: str) -> dict[str, Training]:
    """A recipe with every λ̃, constant and learnt."""
    constant = {f"{strength:g}": f"neutreno:{strength:g}" for strength in STRENGTHS}
    specs = constant | {learn: f"neutreno:0.6,learn={learn}" for learn in LEARNT}
    return {f"{recipe}-neutreno-{name}": Training(recipe, (WHOLE, mitigated(spec))) for name, spec in specs.items()}


def _segmenter(encoder: str, *changes: str) -> Training:
    return Training("ade20k", changes, ("encoder_weights", encoder))


def cifar_name(variant: str, fraction: float) -> str:
    """The name of a ViT-Ti, ViT-Ti⁺ or ViT-Ti⁻ trained on a part of CIFAR-100."""
    return f"cifar100{variant}" + ("" if fraction == 1 else f"-{100 * fraction:.0f}percent")


TRAININGS: Mapping[str, Training] = {
    "deit-tiny": Training("deit_tiny"),
    "deit-tiny-neutreno": Training("deit_tiny", (NEUTRENO,)),
    "deit-tiny-adaptation": Training("deit_tiny_adapt", (), ("weights", "deit-tiny")),
    "deit-tiny-featscale": Training("deit_tiny", (FEATSCALE,)),
    "deit-tiny-neutreno-featscale": Training("deit_tiny", (BOTH,)),
    "deit-tiny-symmetric": Training("deit_tiny_symmetric"),
    "deit-tiny-symmetric-neutreno": Training("deit_tiny_symmetric", (NEUTRENO,)),
    "deit-small": Training("deit_small"),
    "deit-small-neutreno": Training("deit_small", (NEUTRENO,)),
    "deit-small-featscale": Training("deit_small", (FEATSCALE,)),
    "vit-base": Training("deit_tiny", ("task.model.dim=768", "task.model.heads=12")),  # read as drawn only
    "ade20k": _segmenter("deit-tiny"),
    "ade20k-neutreno": _segmenter("deit-tiny-neutreno", NEUTRENO),
    "ade20k-symmetric": _segmenter("deit-tiny-symmetric", "task.model.attention=symmetric"),
    "ade20k-symmetric-neutreno": _segmenter("deit-tiny-symmetric-neutreno", "task.model.attention=symmetric", NEUTRENO),
    "wikitext103": Training("wikitext103"),
    "wikitext103-neutreno": Training("wikitext103", (mitigated("neutreno:0.4"),)),
    "cifar10-kernel": Training("cifar10_kernel", (WHOLE,)),
    "cifar10-kernel-neutreno": Training("cifar10_kernel", (WHOLE, NEUTRENO)),
    **{cifar_name(name, part): _cifar100(spec, part) for name, spec in SPECTRA.items() for part in FRACTIONS},
    **_ablation("cifar100"),
    "digits": Training("digits", (WHOLE,)),
    **_ablation("digits"),
}


def training(name: str) -> Training:
    """A training by its name."""
    if name not in TRAININGS:
        raise AcutanceError(f"no training is called {name!r}; there are {', '.join(TRAININGS)}")
    return TRAININGS[name]
