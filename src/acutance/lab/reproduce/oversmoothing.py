"""The tables and figures of Setting the Record Straight on Transformer Oversmoothing (https://arxiv.org/abs/2401.04301).

Tables and their numbers are those of the poster (the first version); figures are numbered as in the later version.
"""

from acutance.lab.reproduce import measure
from acutance.lab.reproduce.neutreno import CIFAR100, WIKITEXT
from acutance.lab.reproduce.target import Published, Row, Target, Training

VIT_BASE, DEIT_BASE = "timm:vit_base_patch16_224.augreg_in1k", "timm:deit_base_patch16_224.fb_in1k"
PRETRAINED = (
    Row("ViT-B/16, ImageNet", model=VIT_BASE),
    Row("DeiT-B/16, ImageNet", model=DEIT_BASE),
    Row("GPT-2", model="hf:gpt2"),
    Row("BERT", model="hf:google-bert/bert-base-uncased"),
)
RUNS = "a GPU; for each seed {} of 5 million images of 32×32".format


def _deit(sign: str, name: str) -> Training:
    return DEIT.vary(name, f"task.model.mitigation=eigen:{sign},basis=polar")


# DeiT's recipe, in which one optimiser updates all parameters of every row.
DEIT = Training("cifar100-deit", "cifar100_deit", ("task.train_on=all",))
TRIO = {"ViT-Ti": DEIT, "ViT-Ti⁺": _deit("positive", "plus"), "ViT-Ti⁻": _deit("negative", "minus")}
ROWS = {"control, H free": _deit("free", "free"), **TRIO}  # as many parameters as ViT⁺ and ViT⁻, with no sign imposed
BASE = Training("vit-base", "deit_tiny", ("task.model.dim=768", "task.model.heads=12"))
FRACTIONS = (1.0, 0.5, 0.1)  # of CIFAR-100
ON_PARTS: dict[str, tuple[Published, ...]] = {
    "ViT-Ti": ((66.78, 0.1), (56.38, 0.5), (32.47, 0.9)),
    "ViT-Ti⁺": ((64.34, 0.3), (55.21, 0.5), (28.67, 0.5)),
    "ViT-Ti⁻": ((66.62, 0.3), (56.58, 0.3), (33.99, 0.4)),
}
CORRUPTION: dict[str, tuple[Published, ...]] = {  # of intensity 1 to 5
    "ViT-Ti": ((61.59, 0.2), (57.75, 0.2), (53.12, 0.1), (49.32, 0.1), (39.17, 0.2)),
    "ViT-Ti⁺": ((58.36, 0.4), (53.83, 0.5), (49.03, 0.6), (45.15, 0.6), (35.86, 0.6)),
    "ViT-Ti⁻": ((61.62, 0.2), (58.00, 0.3), (53.56, 0.2), (49.70, 0.3), (40.07, 0.2)),
}
TITLES = {"hfc_lfc_spectral": "HFC/LFC", "token_cosine": "token cosine", "singular_ratio": "σ₂/σ₁"}
DEFINITIONS = measure.together(
    *(measure.table(measure.by_layer(metric), title=title, digits=4) for metric, title in TITLES.items())
)


def _shares(smoothing: float) -> dict[str, Published]:
    return {"μ = 1 dominates": smoothing, "another μ dominates": round(100 - smoothing, 2)}


def _part(training: Training, part: float) -> Training:
    return training if part == 1 else training.vary(f"{100 * part:.0f}percent", f"task.fraction={part}")


TARGETS = (
    Target(
        "oversmoothing-table1",
        "Table 1: which eigenvalues of I + H⊗A dominate, % of cases",
        measure.table(measure.dominance),
        (
            Row("ViT-B/16, random", BASE, _shares(100.0), state="initial"),
            Row("ViT-B/16, ImageNet", None, _shares(70.27), model=VIT_BASE),
            Row("DeiT-B/16, ImageNet", None, _shares(57.82), model=DEIT_BASE),
            *(
                Row(f"{label}, CIFAR-100", training, _shares(share))
                for (label, training), share in zip(TRIO.items(), (98.92, 100.0, 0.0), strict=True)
            ),
        ),
        f"CIFAR-100 and ImageNet; timm for the pretrained models; {RUNS('3 runs')}, then minutes",
        "Over samples, layers and heads, each head's attention with the layer's whole H. The paper does not say which "
        "weights of ViT-B/16 it read; these are timm's, trained on ImageNet-1k.",
    ),
    Target(
        "oversmoothing-table2",
        "Table 2: accuracy on parts of CIFAR-100",
        measure.table(measure.scores({"top-1": "top1"})),
        tuple(
            Row(f"{label}, {part:.0%} of the data", _part(training, part), {} if figure is None else {"top-1": figure})
            for label, training in ROWS.items()
            for part, figure in zip(FRACTIONS, ON_PARTS.get(label, (None,) * 3), strict=True)
        ),
        f"CIFAR-100; {RUNS('12 runs')}, eight of them on a half or a tenth of the images",
        "Image size, patch and training are unstated; ours are 32×32, 4×4 and DeiT's recipe with AdamW. The seed "
        "chooses the images of a part, the same for all rows. A part has fewer steps, since its epochs are shorter; "
        "docs/evidence/queue also has runs with equal numbers of steps.",
    ),
    Target(
        "oversmoothing-table3",
        "Table 3: accuracy on corrupted CIFAR-100 by intensity",
        measure.robustness({"0": "clean", **{name[-1]: name for name in measure.CORRUPTED}}),
        tuple(
            Row(label, training, {str(i): x for i, x in enumerate((ON_PARTS[label][0], *CORRUPTION[label]))})
            for label, training in TRIO.items()
        ),
        f"CIFAR-100; {RUNS('3 runs')}, then minutes",
        "Mean over 19 corruptions (15 and 4 extra), read from CIFAR-100-C/ in the data folder if it is there, else "
        "drawn from the test images with CIFAR-C's severities. Each run's own file says which.",
    ),
    Target(
        "oversmoothing-fig1",
        "Figure 1: what earlier theory says of each definition",
        None,
        notes="it is a list of theorems, which are statements in explain/theory.py and explain/spectral_theory.py",
    ),
    Target(
        "oversmoothing-fig2",
        "Figure 2: the definitions of over-smoothing by layer, existing models",
        DEFINITIONS,
        (Row("ViT-Ti, random", CIFAR100, state="initial"), Row("ViT-Ti, CIFAR-100", CIFAR100), *PRETRAINED),
        f"CIFAR-100; {RUNS('a run')}, then minutes; ImageNet, WikiText, timm and transformers for the others",
        "HFC/LFC in the spectral norm, including prefix tokens. The text we have does not say which models the paper "
        "used; these are our choice.",
    ),
    Target(
        "oversmoothing-fig3",
        "Figure 3: the definitions by layer when the spectrum of H is chosen",
        DEFINITIONS,
        tuple(Row(label, training) for label, training in TRIO.items()),
        f"CIFAR-100; {RUNS('3 runs')}, then minutes",
        "H = V Λ Vᵀ with Λ = ±ψ² as on the poster, not the later version's V Λ V⁻¹ with clipped Λ.",
    ),
    Target(
        "oversmoothing-fig4",
        "Figure 4: HFC/LFC of one layer repeated, by norm and sign of its weights",
        measure.norms,
        (),
        "nothing; seconds on a CPU core",
        "16 tokens and channels, 60 layers, 5 random inputs.",
        seeds=1,
    ),
    Target(
        "oversmoothing-fig5",
        "Figure 5: the eigenvalues of H, vision and language models",
        measure.table(measure.spectra, digits=4),
        (Row("ViT-Ti, CIFAR-100", CIFAR100), Row("language model, WikiText-103", WIKITEXT), *PRETRAINED),
        f"CIFAR-100 and WikiText-103; {RUNS('a run')} and one of 12.3 billion words, then minutes; timm and "
        "transformers for the pretrained models",
        "The norm's weight is folded into H; mean over layers, with a histogram for each. The text we have does not "
        "say which models the paper used; these are our choice.",
    ),
    Target(
        "oversmoothing-attacks",
        "Beyond the paper: FGSM and PGD (L∞) on CIFAR-100",
        measure.robustness({"clean": "clean", **measure.ATTACKED}),
        tuple(Row(label, training) for label, training in TRIO.items()),
        f"CIFAR-100; {RUNS('3 runs')}, then minutes",
        "The paper left attacks to future work; there is nothing to compare with. ε = 1/255; PGD takes 20 steps.",
    ),
)
