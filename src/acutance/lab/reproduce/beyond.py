"""What NeuTRENO's paper left to future work: how it stands corruptions and attacks."""

from __future__ import annotations

from acutance.lab.reproduce.neutreno import PAIR, PAPER
from acutance.lab.reproduce.target import Row, Target

COLUMNS = {
    "clean": "clean",
    **{f"severity {level}": f"severity/{level}" for level in range(1, 6)},
    "FGSM": "attack/fgsm",
    "PGD": "attack/pgd",
}
NOTES = (
    "The paper left robustness to future work; there is nothing to compare with. Mean over 19 corruptions (15 and 4 "
    "extra) at each severity, {}; attacks in L∞ with ε = 1/255, PGD takes 20 steps."
)

TARGETS = (
    Target(
        "neutreno-robustness",
        "Beyond the paper: NeuTRENO on corrupted and attacked CIFAR-100",
        PAPER,
        "robustness",
        (Row("ViT-Ti", "cifar100"), Row("NeuTRENO ViT-Ti, λ̃ = 0.6", "cifar100-neutreno-0.6")),
        COLUMNS,
        "CIFAR-100",
        "a GPU; for each seed 2 runs of 5 million images of 32×32, then minutes",
        NOTES.format(
            "read from CIFAR-100-C/ in the data folder if it is there, else drawn with ImageNet-C's severities"
        ),
    ),
    Target(
        "neutreno-robustness-imagenet",
        "Beyond the paper: NeuTRENO DeiT on corrupted and attacked ImageNet",
        PAPER,
        "robustness",
        PAIR,
        COLUMNS,
        "ImageNet",
        "two runs of Table 1 for each seed, then 6 million images through each model, a sixth of them back too; the "
        "images take 7.5 GB of the GPU's memory",
        NOTES.format("drawn from what evaluation cuts out of the test images, with ImageNet-C's severities"),
    ),
)
