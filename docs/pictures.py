"""Draws the pictures of the documentation: `python docs/pictures.py theory` writes docs/assets/theory/*.svg.

Everything is seeded and nothing depends on the clock: the same code gives the same files.
"""

import argparse
import json
import re
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from torch import Tensor

from acutance import Profile
from acutance.attention.operator import AttentionOperator
from acutance.explain import theory
from acutance.explain.steer import sharpening_bound
from acutance.lab.demo import demo_config
from acutance.lab.studies import norm_grid
from acutance.lab.studies import pictures as studies
from acutance.lab.train import train
from acutance.measure.monitor import History
from acutance.metrics import hfc_lfc_frobenius
from acutance.report.page import PALETTE as REPORT_PALETTE
from acutance.report.pictures import blank_figure

ASSETS = Path(__file__).parent / "assets"
EVIDENCE = Path(__file__).parent / "evidence"

# Okabe and Ito's palette: told apart with any colour vision.
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
PALETTE = [BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY]
GREY = "#666666"
STYLE = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "font.size": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "svg.hashsalt": "acutance",
}
MODELS = {"all-MiniLM-L6-v2 (encoder)": "minilm", "SmolLM2-135M (causal)": "smollm2"}
LANGUAGE = {
    "SmolLM2-135M": "smollm2",
    "all-MiniLM-L6-v2": "minilm",
    "rxnfp bert_pretrained": "bert_pretrained",
    "rxnfp bert_ft": "bert_ft",
    "rxnfp bert_ft_10k_25s": "bert_ft_10k_25s",
}
TOKENS, KEY_DIM = 6, 4
STEPS_PER_EPOCH = 97  # of 50,000 images of CIFAR-100 in batches of 512


def example(seed: int, channels: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of one small head."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, 1, TOKENS, KEY_DIM), (1, 1, TOKENS, KEY_DIM), (1, 1, TOKENS, channels)]
    q, k, v = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    return q, k, v


def symmetric_head() -> tuple[AttentionOperator, Tensor]:
    """The head and the values that most pictures are about: sharp enough to smooth slowly."""
    _, k, v = example(seed=1)
    return AttentionOperator(1.6 * k, 1.6 * k, kernel="symmetric"), v


def panels() -> tuple[Figure, list[Axes]]:
    """Two panels side by side."""
    figure, axes = plt.subplots(1, 2, figsize=(7.6, 3.0), layout="constrained")
    return figure, list(axes)


def theorem_1() -> Figure:
    """One Euler step against attention, and the functional along the way there."""
    _, k, v = example(seed=0, channels=8)
    kernel = theory.affinity(k) / 2
    attention = AttentionOperator(k, k, kernel="symmetric") @ v
    step = theory.euler_step(v, kernel)
    figure, (left, right) = panels()

    ends = [attention.min().item(), attention.max().item()]
    left.plot(ends, ends, color=GREY, linewidth=0.8)
    left.plot(attention.flatten(), step.flatten(), "o", color=BLUE, markersize=4, alpha=0.7)
    left.set(xlabel="symmetric attention $Av$", ylabel="Euler step $v - \\Delta t\\,\\nabla J$")
    difference = (attention - step).abs().max().item()
    left.set_title(f"One step is attention (largest difference {difference:.0e})")

    length = torch.linspace(0, 2.4, 97, dtype=torch.float64)
    along = torch.stack([theory.nonlocal_functional(v + t * (step - v), kernel).squeeze() for t in length])
    right.plot(length, along, color=BLUE)
    for t, name in ((0.0, "values $v$"), (1.0, "attention $Av$")):
        height = theory.nonlocal_functional(v + t * (step - v), kernel).item()
        right.plot(t, height, "o", color=VERMILION)
        right.annotate(name, (t, height), xytext=(8, 7 * t - 2), textcoords="offset points")
    right.set(xlabel="length of the step, in units of $\\Delta t$", ylabel="$J$", ylim=(0, None))
    right.set_title("And it goes downhill")
    return figure


def lemma_1() -> Figure:
    """Repeated attention against the mean of simulated walks."""
    A, v = symmetric_head()
    most, walks = 8, 1000
    generator = torch.Generator().manual_seed(0)
    figure, axes = plt.subplots(figsize=(6.2, 3.2), layout="constrained")
    expected = torch.stack([theory.walk_expectation(A, v, steps).squeeze() for steps in range(most + 1)])
    for index, (start, color) in enumerate(zip((2, 0, 5), PALETTE, strict=False)):
        axes.plot(expected[:, start], color=color, label=f"from token {start + 1}")
        ends = torch.stack(
            [theory.simulate_walks(A, v, start, steps, walks, generator).squeeze() for steps in range(most + 1)]
        )
        where = torch.arange(most + 1) + 0.06 * (index - 1)
        bars = 5 * ends.std(-1) / walks**0.5
        axes.errorbar(where, ends.mean(-1), bars, fmt="o", color=color, markersize=4, capsize=2.5, elinewidth=0.9)
    axes.set(xlabel="steps $k$", ylabel="value")
    axes.set_title(f"Lines: $A^k v$.  Dots: mean of {walks} walks, bars 5 standard errors")
    axes.legend()
    return figure


def lemma_2() -> Figure:
    """Tokens falling together, and how fast."""
    A, v = symmetric_head()
    most = 24
    path = torch.stack([theory.walk_expectation(A, v, steps).squeeze() for steps in range(most + 1)])
    limit = theory.smoothing_limit(A, v).squeeze()
    figure, (left, right) = panels()

    for token, color in zip(path.T, PALETTE, strict=True):
        left.plot(token, color=color)
    left.axhline(limit[0].item(), color="black", linestyle="--", linewidth=1)
    left.annotate("$\\sum_j \\pi_j v_j$", (most, limit[0].item()), xytext=(-30, 14), textcoords="offset points")
    left.set(xlabel="repetitions $k$", ylabel="value of each token")
    left.set_title("Every token forgets itself")

    distance, rate = (path - limit).norm(dim=-1), theory.smoothing_rate(A).item()
    right.semilogy(distance, "o", color=BLUE, markersize=3.5, label="$\\|A^k v - $ limit$\\|$")
    line = distance[-1].item() * rate ** (torch.arange(most + 1.0) - most)
    right.semilogy(line, color=VERMILION, label=f"slope $|\\mu_2|^k$, $|\\mu_2| = {rate:.2f}$")
    right.set(xlabel="repetitions $k$")
    right.set_title("At the rate of the second eigenvalue")
    right.legend()
    return figure


def proposition_1() -> Figure:
    """Tokens kept apart, and the disc that decides whether the iteration settles."""
    A, f = symmetric_head()
    strength, most = 0.6, 24
    path = torch.stack([theory.fidelity_iterate(A, f, strength, n).squeeze() for n in range(most + 1)])
    figure, (left, right) = panels()

    for token, end, color in zip(path.T, theory.fidelity_limit(A, f, strength).squeeze(), PALETTE, strict=True):
        left.plot(token, color=color)
        left.plot(most, end, "o", color=color, markersize=5)
    left.annotate("dots: closed form", (most, 0), xytext=(-80, -72), textcoords="offset points", color=GREY)
    left.set(xlabel="repetitions $k$", ylabel="value of each token")
    left.set_title("Pulled towards $f$, tokens stay apart")

    q, k, _ = example(seed=4)
    sharp = AttentionOperator(5 * q, k)
    right.add_patch(Circle((strength, 0), 1, facecolor=SKY, alpha=0.25, edgecolor=BLUE))
    right.plot(strength, 0, "+", color="black", markersize=11, zorder=3)
    right.annotate("$\\tilde\\lambda$", (strength, 0), xytext=(-3, -18), textcoords="offset points")
    for operator, marker, color, name in ((A, "o", GREEN, "symmetric"), (sharp, "^", VERMILION, "sharp, asymmetric")):
        mu = operator.eigenvalues().flatten()
        verdict = "settles" if theory.fidelity_converges(operator, strength).item() else "diverges"
        right.plot(mu.real, mu.imag, marker, color=color, markersize=5, alpha=0.85, label=f"{name}: {verdict}")
    right.set(xlabel="Re $\\mu$", ylabel="Im $\\mu$", aspect="equal", xlim=(-1.3, 1.9), ylim=(-1.75, 1.1))
    right.set_title("It settles iff every $\\mu$ is inside")
    right.legend(loc="lower left", fontsize=8, handletextpad=0.1)
    return figure


def bound() -> Figure:
    """Repeated layers with H = λI on both sides of the bound, and which eigenvalue wins for every λ."""
    k = torch.randn(1, 1, 12, KEY_DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    A = AttentionOperator(k, k, kernel="symmetric").dense()[0, 0]
    mu_min = torch.linalg.eigvals(A).real.min().item()
    border, depth = sharpening_bound(mu_min), 96
    colors = (GREY, GREEN, SKY, BLUE, VERMILION, PURPLE)
    figure, (left, right) = panels()

    for lam, color in zip((0.5, -0.5, -1.0, 0.97 * border, 1.03 * border, -3.0), colors, strict=True):
        X = torch.randn(12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        ratios = [hfc_lfc_frobenius(X)]
        for _ in range(depth):
            X = X + lam * (A @ X)
            X = X / X.norm()  # the ratio does not see it, and nothing overflows
            ratios.append(hfc_lfc_frobenius(X))
        left.semilogy(torch.stack(ratios), color=color, label=f"$\\lambda = {lam:.2f}$")
    left.set(xlabel="layer", ylabel="‖HFC‖ / ‖LFC‖", ylim=(1e-8, 1e3))
    left.set_title("Tokens over depth")
    left.legend(ncols=2, fontsize=8, loc="lower left")

    lam = torch.linspace(-3, 1, 401)
    right.plot(lam, (1 + lam).abs(), color=VERMILION, label="$|1 + \\lambda|$: tokens alike")
    label = f"$|1 + \\lambda\\mu_{{\\min}}|$: tokens apart, $\\mu_{{\\min}} = {mu_min:.2f}$"
    right.plot(lam, (1 + lam * mu_min).abs(), color=BLUE, label=label)
    right.axvspan(border, 0, color=BLUE, alpha=0.08, linewidth=0)
    right.axvspan(-1, 0, color=GREEN, alpha=0.15, linewidth=0)
    right.annotate("bounded,\nclipped", (-0.5, 1.35), ha="center", color=GREEN)
    right.annotate(f"bound\n${border:.2f}$", (border, 0.25), xytext=(-4, 0), textcoords="offset points", ha="right")
    right.set(xlabel="$\\lambda$", ylim=(0, 2.6))
    right.set_title("The larger one wins")
    right.legend(loc="upper center", fontsize=8)
    return figure


def repeated_layers() -> Figure:
    """One layer repeated under every norm, input convergence only."""
    return studies.repeat_picture(norm_grid(layers=30, samples=1), definitions=list(studies.FALLING)[:1])


def depth() -> Figure:
    """The study that stands in evidence/, every sixth layer, input convergence only."""
    frame = pd.read_csv(EVIDENCE / "depth" / "depth.csv")
    chosen = frame[frame["layer"] % 6 == 0]
    return studies.depth_picture(chosen, [12, 48, 96], definitions=list(studies.DEPTH_PANELS)[:1])


def kernel() -> Figure:
    """Trained models as they stand in evidence/."""
    return studies.kernel_picture(pd.read_csv(EVIDENCE / "kernel" / "kernel.csv"))


def symmetry() -> Figure:
    """How symmetric H is over training: every layer of the plain variant, and the mean over layers of each variant."""
    frame, plain = pd.read_csv(EVIDENCE / "symmetry" / "symmetry.csv"), "softmax-small"
    figure, axes = blank_figure(1, 2, width=4.2, height=3.0)
    left, right = axes[0]
    own = frame[frame["variant"] == plain]
    depth = int(own["layer"].max())
    for layer in range(1, depth + 1):
        means = own[own["layer"] == layer].groupby("epoch")["symmetry"].mean()
        label = f"layer {layer}" if layer in (1, depth) else None
        share = (layer - 1) / max(depth - 1, 1)  # from a light to a dark blue: the deeper, the darker
        left.plot(means, color=(0.65 - 0.6 * share, 0.8 - 0.55 * share, 0.95 - 0.5 * share), label=label)
    for variant, colour in zip(frame["variant"].unique(), cycle(REPORT_PALETTE), strict=False):
        mean = frame[frame["variant"] == variant].groupby(["epoch", "seed"])["symmetry"].mean()
        studies.spread_curve(right, mean, "epoch", colour, "-", str(variant))
    titles = (f"{plain}, layer by layer (mean over seeds)", "mean over layers ± spread over seeds")
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set(xlabel="epoch", ylabel="cosine between H and Hᵀ")
        axis.set_title(title, fontsize=9)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8)
    return figure


def watched_digits() -> Figure:
    """The demo's plain ViT, seed 0, measured before its training and after every epoch of 22 steps."""
    with TemporaryDirectory() as folder:
        train(demo_config("loop.monitor_every=22"), folder, device="cpu")
        history = History.load(Path(folder) / "monitor.jsonl")
    for step, profile in history.items():
        kept = [r for r in profile.readings if r.metric == "token_cosine"]
        history[step] = Profile(tuple(kept), profile.context)
    return history.plot()


def watched_cifar100() -> Figure:
    """The runs in evidence/: the stream over training, mean of three seeds; then stream and branch by layer, seed 0."""
    names = {"plain": "plain", "NeuTRENO": "neutreno"}
    readings = pd.read_csv(EVIDENCE / "cifar100" / "monitor.csv").set_index(["metric", "layer", "model"])
    titles = {"hfc_lfc_frobenius": "‖HFC‖ / ‖LFC‖, stream", "token_cosine": "Token cosine, stream"}
    figure, axes = plt.subplots(1, 3, figsize=(9.6, 3.2), layout="constrained")
    for (name, file), color in zip(names.items(), (BLUE, VERMILION), strict=True):
        for axis, metric in zip(axes, titles, strict=False):
            for layer, style in {1: ":", 6: "--", 12: "-"}.items():
                curve = readings.loc[metric, layer, file]
                epoch, mean, spread = curve["step"] / STEPS_PER_EPOCH, curve["mean"], curve["std"]
                axis.plot(epoch, mean, style, color=color, label=f"{name}, layer {layer}")
                axis.fill_between(epoch, mean - spread, mean + spread, color=color, alpha=0.15, linewidth=0)
        profile = Profile.load(EVIDENCE / "cifar100" / f"measure-{file}.json")
        for tap, marker, place in (("block", "o-", "stream"), ("attention", "^--", "branch")):
            found = profile.select("token_cosine", tap)
            curve = [r.layer for r in found], [r.mean for r in found]
            axes[2].plot(*curve, marker, color=color, markersize=3, label=f"{name}, {place}")
    for axis, title in zip(axes, [*titles.values(), "Token cosine after training"], strict=True):
        axis.set_title(title)
    axes[0].set(xlabel="epoch", ylim=(0, None))
    axes[1].set(xlabel="epoch", ylim=(0, 1))
    axes[2].set(xlabel="layer", ylim=(0, 1))
    axes[1].legend(fontsize=7, ncols=2, loc="lower center")
    axes[2].legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.42, 0.72))
    return figure


def pretrained() -> Figure:
    """The two profiles that stand in evidence/, over relative depth."""
    profiles = {name: Profile.load(EVIDENCE / "real-models" / f"{file}.json") for name, file in MODELS.items()}
    titles = {
        ("token_cosine", "block"): "Token cosine, stream",
        ("token_cosine", "attention"): "Token cosine, attention branch",
        ("attention_entropy", "attention_matrix"): "Attention entropy (nats)",
    }
    figure, axes = plt.subplots(1, 3, figsize=(9.6, 3.0), layout="constrained")
    for axis, ((metric, tap), title) in zip(axes, titles.items(), strict=True):
        for (name, profile), color in zip(profiles.items(), PALETTE, strict=False):
            readings = profile.select(metric, tap)
            depth = torch.tensor([r.layer for r in readings]) / readings[-1].layer
            mean, spread = (torch.tensor([getattr(r, key) for r in readings]) for key in ("mean", "std"))
            axis.plot(depth, mean, "o-", color=color, markersize=2.5, label=name)
            axis.fill_between(depth, mean - spread, mean + spread, color=color, alpha=0.2, linewidth=0)
        axis.set(xlabel="layer / depth", ylim=(0, None))
        axis.set_title(title)
    axes[0].legend(fontsize=8, loc="upper left")
    return figure


def language(axis: Axes, key: str, ending: str = "") -> None:
    """A figure of the records over relative depth: median over batches, lowest to highest."""
    for (name, file), color in zip(LANGUAGE.items(), PALETTE, strict=False):
        layers = json.loads((EVIDENCE / "language" / f"{file}{ending}.json").read_text())["layers"]
        depth = [layer["layer"] / len(layers) for layer in layers]
        found = torch.tensor([layer[key] for layer in layers]).view(len(layers), -1)
        axis.plot(depth, found.quantile(0.5, dim=1), "o-", color=color, markersize=2.5, label=name)
        axis.fill_between(depth, found.amin(1), found.amax(1), color=color, alpha=0.2, linewidth=0)
    axis.set(xlabel="layer / depth")


def language_spectra() -> Figure:
    """Figure 5 for language models, as shares; and which family dominates."""
    titles = ("Share of λ with Re λ < 0", "μ = 1 dominates, whole H", "μ = 1 dominates, head by head")
    figure, axes = plt.subplots(1, 3, figsize=(9.6, 3.2), layout="constrained")
    for axis, title, key in zip(axes, titles, ("negative_share", "smoothing", "smoothing_by_head"), strict=True):
        language(axis, key)
        axis.axhline(0.5, color=GREY, linewidth=0.8)
        axis.set(ylim=(-0.03, 1.03))
        axis.set_title(title)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    return figure


def language_smoothing() -> Figure:
    """What each part of a block did to HFC/LFC, of all tokens and without the first."""
    figure, axes = plt.subplots(2, 2, figsize=(9.6, 5.6), layout="constrained", sharex=True, sharey=True)
    counted = {"": "all tokens", "-without-first": "without the first"}
    parts = {"attention": "attention", "rest": "rest of the block"}
    for row, (ending, tokens) in zip(axes, counted.items(), strict=True):
        for axis, (key, part) in zip(row, parts.items(), strict=True):
            language(axis, key, ending)
            axis.axhline(0, color=GREY, linewidth=0.8)
            axis.set_yscale("symlog", linthresh=0.2, linscale=1.5)  # linear up to 0.2
            axis.set(ylim=(-2.5, 5), yticks=(ticks := (-2, -1, -0.2, -0.1, 0, 0.1, 0.2, 1, 4)), yticklabels=ticks)
            axis.minorticks_off()
            axis.set_title(f"Log change of HFC/LFC, {part}, {tokens}")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    return figure


PICTURES: dict[str, dict[str, Callable[[], Figure]]] = {
    "theory": {"theorem-1": theorem_1, "lemma-1": lemma_1, "lemma-2": lemma_2, "proposition-1": proposition_1},
    "steer": {"bound": bound},
    "measure": {"pretrained": pretrained},
    "explain": {"spectra": language_spectra, "smoothing": language_smoothing},
    "monitor": {"digits": watched_digits, "cifar100": watched_cifar100},
    "laboratory": {"repeat": repeated_layers, "depth": depth, "kernel": kernel, "symmetry": symmetry},
}


def rounded(svg: str) -> str:
    """Paths and places to a hundredth of a point: matplotlib writes a millionth, which doubles the file."""
    shorten = partial(re.sub, r"(\.\d\d)\d+", r"\1")
    return re.sub(r'\b(?:d|x|y)="[^"]*"', lambda found: shorten(found[0]), svg)


def main() -> None:
    """Draw the pictures of the pages named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", choices=PICTURES, nargs="+")
    with mpl.rc_context(STYLE):
        for page in parser.parse_args().page:
            (ASSETS / page).mkdir(parents=True, exist_ok=True)
            for name, draw in PICTURES[page].items():
                figure = draw()
                # White behind the drawing keeps it readable on a dark page; no date keeps the file the same.
                path = ASSETS / page / f"{name}.svg"
                figure.savefig(path, facecolor="white", metadata={"Date": None})
                path.write_text(rounded(path.read_text()))
                plt.close(figure)


if __name__ == "__main__":
    main()
