"""The tables and figures of Setting the Record Straight on Transformer Oversmoothing (https://arxiv.org/abs/2401.04301).

Tables and their numbers are those of the poster (the first version); figures are numbered as in the later version.
"""

from __future__ import annotations

from acutance.lab.reproduce.target import Published, Row, Target
from acutance.lab.reproduce.trainings import FRACTIONS, SPECTRA, cifar_name

PAPER = "2401.04301"
LABELS = {"": "ViT-Ti", "-plus": "ViT-Ti⁺", "-minus": "ViT-Ti⁻"}
CIFAR = "CIFAR-100"
VIT_BASE, DEIT_BASE = "timm:vit_base_patch16_224.augreg_in1k", "timm:deit_base_patch16_224.fb_in1k"
TRIO = tuple(Row(LABELS[variant], cifar_name(variant, 1.0)) for variant in SPECTRA)
PRETRAINED = (
    Row("ViT-B/16, ImageNet", model=VIT_BASE),
    Row("DeiT-B/16, ImageNet", model=DEIT_BASE),
    Row("GPT-2", model="hf:gpt2"),
    Row("BERT", model="hf:google-bert/bert-base-uncased"),
)
RUNS = "a GPU; for each seed {} of 5 million images of 32×32"
DEFINITIONS = {
    "HFC/LFC": "test/hfc_lfc_spectral@block",
    "token cosine": "test/token_cosine@block",
    "σ₂/σ₁": "test/singular_ratio@block",
}
# By variant: 100, 50 and 10 % of the data; then corruption of intensity 1 to 5.
DATA: dict[str, tuple[Published, ...]] = {
    "": ((66.78, 0.1), (56.38, 0.5), (32.47, 0.9)),
    "-plus": ((64.34, 0.3), (55.21, 0.5), (28.67, 0.5)),
    "-minus": ((66.62, 0.3), (56.58, 0.3), (33.99, 0.4)),
}
CORRUPTION: dict[str, tuple[Published, ...]] = {
    "": ((61.59, 0.2), (57.75, 0.2), (53.12, 0.1), (49.32, 0.1), (39.17, 0.2)),
    "-plus": ((58.36, 0.4), (53.83, 0.5), (49.03, 0.6), (45.15, 0.6), (35.86, 0.6)),
    "-minus": ((61.62, 0.2), (58.00, 0.3), (53.56, 0.2), (49.70, 0.3), (40.07, 0.2)),
}
INTENSITIES = {"0": "clean", **{str(i): f"severity/{i}" for i in range(1, 6)}}


def _shares(smoothing: float) -> dict[str, Published]:
    return {"μ = 1 dominates": smoothing, "another μ dominates": round(100 - smoothing, 2)}


TARGETS = (
    Target(
        "oversmoothing-table1",
        "Table 1: which eigenvalues of I + H⊗A dominate, % of cases",
        PAPER,
        "dominance",
        (
            Row("ViT-B/16, random", "vit-base", state="initial", published=_shares(100.0)),
            Row("ViT-B/16, ImageNet", model=VIT_BASE, published=_shares(70.27)),
            Row("DeiT-B/16, ImageNet", model=DEIT_BASE, published=_shares(57.82)),
            Row("ViT-Ti, CIFAR-100", "cifar100", published=_shares(98.92)),
            Row("ViT-Ti⁺, CIFAR-100", "cifar100-plus", published=_shares(100.0)),
            Row("ViT-Ti⁻, CIFAR-100", "cifar100-minus", published=_shares(0.0)),
        ),
        {"μ = 1 dominates": "smoothing", "another μ dominates": "sharpening"},
        "CIFAR-100 and ImageNet; timm for the pretrained models",
        f"{RUNS.format('3 runs')}, then minutes",
        "Over samples, layers and heads, each head's attention with the layer's whole H. Which weights of ViT-B/16 the "
        "paper read is unstated: these are timm's, trained on ImageNet-1k.",
    ),
    Target(
        "oversmoothing-table2",
        "Table 2: accuracy on parts of CIFAR-100",
        PAPER,
        "scores",
        tuple(
            Row(f"{LABELS[variant]}, {part:.0%} of the data", cifar_name(variant, part), published={"top-1": figure})
            for variant in SPECTRA
            for part, figure in zip(FRACTIONS, DATA[variant], strict=True)
        ),
        {"top-1": "test/top1"},
        CIFAR,
        f"{RUNS.format('9 runs')}, six of them on a half or a tenth of the images",
        "Image size, patch and training are unstated; ours are 32×32, 4×4 and a strong recipe, which moves matrices by "
        "Muon but the parameters of H's spectrum by AdamW. The parts are the first "
        "images of each class. A part has fewer steps, since its epochs are shorter.",
    ),
    Target(
        "oversmoothing-table3",
        "Table 3: accuracy on corrupted CIFAR-100 by intensity",
        PAPER,
        "robustness",
        tuple(
            Row(
                row.label,
                row.training,
                published={"0": DATA[variant][0], **{str(i + 1): x for i, x in enumerate(CORRUPTION[variant])}},
            )
            for row, variant in zip(TRIO, SPECTRA, strict=True)
        ),
        INTENSITIES,
        CIFAR,
        f"{RUNS.format('3 runs')}, then minutes",
        "Mean over 19 corruptions (15 and 4 extra), read from CIFAR-100-C/ in the data folder if it is there, else "
        "drawn from the test images here, with the severities of ImageNet-C, which are harsher: then the figures do "
        "not stand beside the published ones. Each run's own file says which it was.",
    ),
    Target(
        "oversmoothing-fig1",
        "Figure 1: what earlier theory says of each definition",
        PAPER,
        "",
        notes="it is a list of theorems; explain/theory.py and explain/spectral_theory.py have them as statements",
    ),
    Target(
        "oversmoothing-fig2",
        "Figure 2: the definitions of over-smoothing by layer, existing models",
        PAPER,
        "layers",
        (Row("ViT-Ti, random", "cifar100", state="initial"), Row("ViT-Ti, CIFAR-100", "cifar100"), *PRETRAINED),
        DEFINITIONS,
        "CIFAR-100; for the pretrained models ImageNet, WikiText, timm and transformers",
        f"{RUNS.format('a run')}, then minutes",
        "HFC/LFC in the spectral norm, prefix tokens in. Which models the paper has is not in the text we read: these "
        "are our choice.",
    ),
    Target(
        "oversmoothing-fig3",
        "Figure 3: the definitions by layer when the spectrum of H is chosen",
        PAPER,
        "layers",
        TRIO,
        DEFINITIONS,
        CIFAR,
        f"{RUNS.format('3 runs')}, then minutes",
        "H = V Λ Vᵀ with Λ = ±ψ² as on the poster, not the later version's V Λ V⁻¹ with clipped Λ.",
    ),
    Target(
        "oversmoothing-fig4",
        "Figure 4: HFC/LFC of one layer repeated, by norm and sign of its weights",
        PAPER,
        "norms",
        (),
        {"HFC/LFC at the end": "hfc_lfc"},
        "nothing",
        "seconds on a CPU core",
        "As `acutance lab repeat`: 16 tokens and channels, 60 layers, 5 random inputs.",
        seeds=1,
    ),
    Target(
        "oversmoothing-fig5",
        "Figure 5: the eigenvalues of H, vision and language models",
        PAPER,
        "spectra",
        (
            Row("ViT-Ti, CIFAR-100", "cifar100"),
            Row("language model, WikiText-103", "wikitext103"),
            *PRETRAINED,
        ),
        {"negative real part, %": "negative", "median of the real parts": "median"},
        "CIFAR-100 and WikiText-103; timm and transformers for the pretrained models",
        f"{RUNS.format('a run')} and one of 12.3 billion words, then minutes",
        "The norm's weight is folded into H; mean over layers, with a histogram for each. Which models the paper has "
        "is not in the text we read: these are our choice.",
    ),
    Target(
        "oversmoothing-attacks",
        "Beyond the paper: FGSM and PGD (L∞) on CIFAR-100",
        PAPER,
        "robustness",
        TRIO,
        {"clean": "clean", "FGSM": "attack/fgsm", "PGD": "attack/pgd"},
        CIFAR,
        f"{RUNS.format('3 runs')}, then minutes",
        "The paper left attacks to future work; there is nothing to compare with. ε = 1/255; PGD takes 20 steps.",
    ),
)
