"""The tables and figures of NeuTRENO (https://arxiv.org/abs/2312.00751)."""

from __future__ import annotations

from acutance.lab.reproduce.target import Row, Target

PAPER = "2312.00751"
IMAGENET = "ImageNet"
GPU = "GPUs"
TINY_RUN = "384 million images through DeiT-tiny, forward and back"
CLASSIFICATION = {"top-1": "test/top1", "top-5": "test/top5"}
SEGMENTATION = {"SS mIoU": "test/miou", "MS mIoU": "test/miou_ms"}
SAMPLES = "1000 images chosen at random, the same for all models; prefix tokens count"
PAIR = (Row("DeiT", "deit-tiny"), Row("NeuTRENO DeiT", "deit-tiny-neutreno"))
SHARED = "the runs of Table 1, then minutes"


def _accuracy(label: str, training: str, top1: float, top5: float) -> Row:
    return Row(label, training, published={"top-1": top1, "top-5": top5})


def _iou(label: str, training: str, single: float, multiple: float) -> Row:
    return Row(label, training, published={"SS mIoU": single, "MS mIoU": multiple})


TABLES = (
    Target(
        "neutreno-table1",
        "Table 1: DeiT-tiny on ImageNet, with NeuTRENO, adaptation and FeatScale",
        PAPER,
        "scores",
        (
            _accuracy("Softmax DeiT", "deit-tiny", 72.17, 91.02),
            _accuracy("NeuTRENO DeiT", "deit-tiny-neutreno", 73.01, 91.56),
            _accuracy("NeuTRENO adaptation", "deit-tiny-adaptation", 72.63, 91.38),
            _accuracy("DeiT + FeatScale", "deit-tiny-featscale", 72.346, 91.22),
            _accuracy("NeuTRENO DeiT + FeatScale", "deit-tiny-neutreno-featscale", 73.23, 91.73),
        ),
        CLASSIFICATION,
        IMAGENET,
        f"{GPU}; for each seed 4 runs of {TINY_RUN}, and a third of one",
        "The rate of the adaptation is unstated: a tenth of that from scratch. FeatScale is its own paper's formula.",
    ),
    Target(
        "neutreno-table2",
        "Table 2: Segmenter on ADE20K, DeiT against NeuTRENO DeiT",
        PAPER,
        "scores",
        (
            _iou("Softmax DeiT", "ade20k", 35.72, 36.68),
            _iou("NeuTRENO DeiT", "ade20k-neutreno", 37.24, 38.06),
        ),
        SEGMENTATION,
        "ADE20K and ImageNet",
        "a GPU; for each seed 2 runs of 1.3 million crops of 512, after two of Table 1",
        "NeuTRENO is in encoder and decoder, each with its own v⁰, as in the public code.",
    ),
    Target(
        "neutreno-table3",
        "Table 3: language modelling on WikiText-103",
        PAPER,
        "scores",
        (
            Row("Softmax Transformer", "wikitext103", published={"test perplexity": 34.29}),
            Row("NeuTRENO", "wikitext103-neutreno", published={"test perplexity": 33.70}),
        ),
        {"valid perplexity": "val/perplexity?task.val_stride=1", "test perplexity": "test/perplexity"},
        "WikiText-103",
        "a GPU; for each seed 2 runs of 12.3 billion words",
        "Both texts are read with a window that moves on by one word. λ̃ = 0.4.",
    ),
    Target(
        "neutreno-table4",
        "Table 4: cosine between the symmetric and the asymmetric gradient of J(u)",
        PAPER,
        "layer-means",
        (
            Row("Sym-DeiT", "deit-tiny-symmetric", published={"training data": 0.982, "test data": 0.976}),
            Row("Softmax DeiT", "deit-tiny", published={"training data": 0.973, "test data": 0.964}),
        ),
        {"training data": "train/gradient_alignment", "test data": "test/gradient_alignment"},
        IMAGENET,
        f"{GPU}; a run of Table 1 and one of Table 5, then minutes",
        f"{SAMPLES}; mean over positions, heads and layers. Of symmetric attention our two gradients are one, hence 1: "
        "how the paper's Sym-DeiT comes to 0.982 is unstated.",
    ),
    Target(
        "neutreno-table5",
        "Table 5: DeiT-tiny with symmetric attention on ImageNet",
        PAPER,
        "scores",
        (
            _accuracy("Sym-DeiT", "deit-tiny-symmetric", 71.14, 90.54),
            _accuracy("Sym-NeuTRENO DeiT", "deit-tiny-symmetric-neutreno", 72.07, 91.22),
        ),
        CLASSIFICATION,
        IMAGENET,
        f"{GPU}; for each seed 2 runs of {TINY_RUN}",
    ),
    Target(
        "neutreno-table6",
        "Table 6: Segmenter on ADE20K with symmetric attention",
        PAPER,
        "scores",
        (
            _iou("Sym-DeiT", "ade20k-symmetric", 35.18, 36.00),
            _iou("Sym-NeuTRENO DeiT", "ade20k-symmetric-neutreno", 35.68, 36.39),
        ),
        SEGMENTATION,
        "ADE20K and ImageNet",
        "a GPU; for each seed 2 runs of 1.3 million crops of 512, after those of Table 5",
        "The decoder's attention is symmetric too.",
    ),
    Target(
        "neutreno-table7",
        "Table 7: DeiT-small on ImageNet",
        PAPER,
        "scores",
        (
            _accuracy("DeiT-small", "deit-small", 79.97, 95.05),
            _accuracy("DeiT-small + FeatScale", "deit-small-featscale", 79.96, 95.06),
            _accuracy("NeuTRENO DeiT-small", "deit-small-neutreno", 80.68, 95.30),
        ),
        CLASSIFICATION,
        IMAGENET,
        f"{GPU}; for each seed 3 runs of {TINY_RUN.replace('tiny', 'small')}",
    ),
    Target(
        "neutreno-table8",
        "Table 8: kernel attention on CIFAR-10",
        PAPER,
        "scores",
        (
            Row("Kernel Transformer", "cifar10-kernel", published={"accuracy": 75.89}),
            Row("NeuTRENO", "cifar10-kernel-neutreno", published={"accuracy": 76.75}),
        ),
        {"accuracy": "test/top1"},
        "CIFAR-10",
        "a GPU; for each seed 2 runs of 5 million images of 32×32",
        "Kernel and training are unstated: the RBF kernel and our strong recipe, so both figures should be higher.",
    ),
)

FIGURES = (
    Target(
        "neutreno-fig1",
        "Figure 1: cosine similarity of tokens by layer, ImageNet and ADE20K",
        PAPER,
        "layers",
        (*PAIR, Row("Segmenter, DeiT", "ade20k"), Row("Segmenter, NeuTRENO DeiT", "ade20k-neutreno")),
        {"token cosine": "test/token_cosine@block"},
        "ImageNet and ADE20K",
        "the runs of Tables 1 and 2, then minutes",
        f"{SAMPLES}; after each block, of a Segmenter its encoder's.",
    ),
    Target(
        "neutreno-fig2",
        "Figure 2: how NeuTRENO is built",
        PAPER,
        "",
        notes="it is a drawing of u = Av + λ̃(v⁰ − v), which is acutance/mitigations/neutreno.py",
    ),
    Target(
        "neutreno-fig3",
        "Figure 3: the functional J(u) by layer, training and test images",
        PAPER,
        "layers",
        (Row("DeiT", "deit-tiny"),),
        {"J(u), training": "train/nonlocal_energy@map", "J(u), test": "test/nonlocal_energy@map"},
        IMAGENET,
        SHARED,
        f"{SAMPLES}; J with the rows of A summing to one, mean over heads.",
    ),
    Target(
        "neutreno-fig4",
        "Figure 4: attention maps of layers 1, 6 and 12, per head",
        PAPER,
        "maps",
        PAIR,
        {"picture": "test"},
        IMAGENET,
        SHARED,
        "One test image chosen at random.",
        seeds=1,
    ),
    Target(
        "neutreno-fig5",
        "Figure 5: cosine of attention matrices between successive layers",
        PAPER,
        "layers",
        PAIR,
        {"cosine with the layer before": "test/attention_cosine@map"},
        IMAGENET,
        SHARED,
        SAMPLES,
    ),
    Target(
        "neutreno-fig6",
        "Figure 6: cosine similarity of tokens by layer before any training",
        PAPER,
        "layers",
        (Row("DeiT", "deit-tiny", state="initial"), Row("NeuTRENO DeiT", "deit-tiny-neutreno", state="initial")),
        {"token cosine": "test/token_cosine@block"},
        IMAGENET,
        "minutes on a CPU: nothing is trained",
        SAMPLES,
    ),
)

OTHERS = (
    Target(
        "neutreno-efficiency",
        "Appendix G.4: operations, memory and time of inference, NeuTRENO DeiT over DeiT",
        PAPER,
        "efficiency",
        (
            Row(
                "NeuTRENO DeiT / DeiT",
                "deit-tiny-neutreno",
                state="initial",
                published={"operations": 1.00005, "memory": 1.000002, "time": 1.00013},
            ),
        ),
        {"operations": "operations", "memory": "memory", "time": "time"},
        "nothing",
        "minutes; memory is read on a GPU only",
        "Ratios do not depend on the weights, so nothing is trained. Time is the median of interleaved calls.",
    ),
)
TARGETS = (*TABLES, *FIGURES, *OTHERS)
