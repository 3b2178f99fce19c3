"""What can be wrong with a model: each detector is a small function of the readings, with its thresholds in sight.

A detector has a score per layer. A layer at or above the `NOTICED` score is named; how bad that is, the detector says.
The thresholds were chosen on models with planted faults and tried on others: see docs/diagnose.md.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from acutance.diagnose.readings import Numbers, Readings

Severity = Literal["ok", "note", "warning", "severe"]
SEVERITIES: tuple[Severity, ...] = ("ok", "note", "warning", "severe")
MOST = 7  # findings in a diagnosis
FEW_SAMPLES, FEW_TOKENS = 4, 8  # below these the samples' embeddings, or the share of one token, say nothing

# From which score on a layer is named. The score is in the function of the same name.
NOTICED = {
    "tokens alike": 0.5,
    "constant attention branch": 0.8,
    "embeddings alike": 0.9,
    "attention sink": 0.3,
    "outlier tokens": 5.0,
    "patches rewired": 2.5,
    "idle layers": 0.985,
    "idle heads": 0.95,
    "attention to itself": 0.5,
    "even attention": 0.985,
    "smoothing weights": 0.2,
}


@dataclass(frozen=True)
class Finding:
    """One thing that was found."""

    name: str
    severity: Severity
    layers: tuple[int, ...]  # where; 0 is what enters the first, and one more than the last is the final representation
    evidence: str
    meaning: str
    advice: str  # a command, in which {model} and {data} stand for what was diagnosed


def findings(readings: Readings) -> list[Finding]:
    """What was found, the worst first."""
    found = [finding for detect in DETECTORS.values() if (finding := detect(readings)) is not None]
    return sorted(found, key=lambda finding: -SEVERITIES.index(finding.severity))[:MOST]


def is_alarm(finding: Finding) -> bool:
    """Whether it says that something is wrong, or notable: tokens that grow alike a little are neither."""
    return finding.name != "tokens alike" or finding.severity != "note"


def score(name: str, readings: Readings) -> Numbers:
    """The score of a detector per layer; NaN where it has nothing to go by."""
    needed, of = SCORES[name]
    return of(readings) if all(key in readings for key in needed) else np.full(readings.layers, np.nan)


NONE: Numbers = np.full(1, np.nan)
SCORES: dict[str, tuple[Sequence[str], Callable[[Readings], Numbers]]] = {
    "tokens alike": (("cosine",), lambda r: r["cosine"][-1:]),
    "constant attention branch": (("branch_residual",), lambda r: 1 - r["branch_residual"]),
    "embeddings alike": (("pooled_cosine",), lambda r: r["pooled_cosine"][-1:] if enough(r, "samples") else NONE),
    "attention sink": (("top",), lambda r: heads_mean(r["top"]) if enough(r, "tokens") else NONE),
    "outlier tokens": (("norm_outlier",), lambda r: r["norm_outlier"]),
    "patches rewired": (("patch_drift",), lambda r: jumps(r["patch_drift"])),
    "idle layers": (("influence",), lambda r: 1 - r["influence"]),
    "idle heads": (("head_share", "head_twin"), lambda r: np.nanmax(idle_heads(r), axis=1)),
    "attention to itself": (("own",), lambda r: heads_mean(r["own"])),
    "even attention": (("evenness",), lambda r: heads_mean(r["evenness"])),
    "smoothing weights": (("tendency",), lambda r: -r["tendency"]),
}


def enough(r: Readings, what: str) -> bool:
    """Whether there are enough samples, or tokens in a sample, to tell."""
    return bool(r.facts[what] >= {"samples": FEW_SAMPLES, "tokens": FEW_TOKENS}[what])


def heads_mean(values: Numbers) -> Numbers:
    """The mean over heads; NaN in a layer that was not read."""
    seen = ~np.isnan(values)
    return np.where(seen.any(1), np.where(seen, values, 0).sum(1) / np.maximum(seen.sum(1), 1), np.nan)


def jumps(drift: Numbers) -> Numbers:
    """How much further a layer moves the patches' cosines than the layers do at the median, from the third layer on.

    The first two arrange the patches anew in healthy models too.
    """
    middle = np.nanmedian(drift)
    return np.where(np.arange(len(drift)) < 2, np.nan, drift / max(middle, 0.02))


def idle_heads(r: Readings) -> Numbers:
    """Of each head: how little it adds (1 − its share of the mean norm), or how much another head adds the same."""
    return np.fmax(1 - r["head_share"], r["head_twin"])


def noticed(name: str, readings: Readings) -> tuple[int, ...]:
    """The layers at or above the threshold."""
    return tuple(int(layer) + 1 for layer in np.flatnonzero(score(name, readings) >= NOTICED[name]))


def tokens_alike(r: Readings) -> Finding | None:
    """Tokens point the same way after the last layer."""
    cosine = r["cosine"]
    start, end = float(cosine[0]), float(cosine[-1])
    if end < NOTICED["tokens alike"]:
        return None
    layers = where_it_rose(cosine)
    if end - start < 0.1:
        where, meaning = f"already {start:.2f} before layer 1", "The tokens are alike before the first layer."
    else:
        where = f"{start:.2f} before layer 1, most of the rise in {named(layers)}{by_part(r, layers)}"
        meaning = "The layers bring the tokens together: over-smoothing, if what is lost was needed."
    severity: Severity = "note" if end < 0.9 else "warning" if end < 0.98 else "severe"
    if severity == "note":
        meaning = "Trained models that work well reach this too. By itself it is no fault."
    evidence = f"mean cosine of tokens {end:.2f} after the last layer; {where}"
    return Finding("tokens alike", severity, layers, evidence, meaning, "acutance mitigate {model} neutreno:0.4 {data}")


def where_it_rose(cosine: Numbers) -> tuple[int, ...]:
    """The fewest layers that make up half of all that the cosine rose."""
    rises = np.maximum(np.diff(cosine), 0).round(6)  # equal steps by depth
    order = np.argsort(-rises, kind="stable")
    count = int(np.searchsorted(np.cumsum(rises[order]), rises.sum() / 2)) + 1
    return tuple(sorted(int(layer) + 1 for layer in order[:count]))


def by_part(r: Readings, layers: Sequence[int]) -> str:
    """Whether attention or the rest of these layers brought the tokens together, by the change of log HFC/LFC."""
    if "attention_change" not in r:
        return ""
    places = np.array(layers) - 1
    attention = r["attention_change"][places].sum()
    rest = r["change"][places].sum() - attention
    if np.isnan(rest) or min(attention, rest) >= 0:
        return ""
    part = "attention" if attention < rest else "the MLP and norms"
    return f", by {part}"


def constant_branch(r: Readings) -> Finding | None:
    """The attention branch adds nearly the same to every token: rank collapse, as at initialisation."""
    name = "constant attention branch"
    layers, scores = noticed(name, r), score(name, r)
    if 2 * len(layers) < np.isfinite(scores).sum() or not layers:
        return None
    most = float(np.nanmedian(scores))
    evidence = f"{named(layers)}: {most:.0%} of what attention adds is the same for all tokens (median)"
    meaning = (
        "Attention averages over all tokens. At the start of training this slows it; after it, attention is unused."
    )
    return Finding(name, "warning", layers, evidence, meaning, "acutance mitigate {model} attnscale {data}")


def embeddings_alike(r: Readings) -> Finding | None:
    """The samples' mean tokens point the same way at the end."""
    name, curve = "embeddings alike", r["pooled_cosine"]
    if not noticed(name, r):
        return None
    end, rank, before = float(curve[-1]), float(r["pooled_rank"][-1]), float(np.min(curve[1:-1], initial=1.0))
    severity: Severity = "note" if r.facts["causal"] else "severe" if end > 0.99 else "warning"
    only = f"; {before:.2f} at best in the layers before" if before < NOTICED[name] else ""
    evidence = f"mean cosine of mean-pooled samples {end:.2f}, RankMe {rank:.1f} of {r.facts['samples']} samples{only}"
    meaning = "Cosines between embeddings hardly tell texts or images apart."
    if r.facts["causal"]:
        meaning += " Usual in language models; it matters if you use their embeddings."
    return Finding(name, severity, (r.layers,), evidence, meaning, "acutance measure {model} {data} --tap block,final")


def attention_sink(r: Readings) -> Finding | None:
    """One token gets much of the attention."""
    name = "attention sink"
    layers, scores = noticed(name, r), score(name, r)
    if not layers:
        return None
    places = np.array(layers) - 1
    most, first = float(scores[places].mean()), float(heads_mean(r["first"])[places].mean())
    whom = "the first token gets" if first > 0.8 * most else "one token gets"
    severity: Severity = "warning" if (scores >= 0.9).sum() > len(scores) / 2 else "note"
    meaning = "Heads rest on a token when they have nothing to add: usual in trained models."
    if severity == "warning":
        meaning = "Hardly any attention is left for the content."
    evidence = f"{named(layers)}: {whom} {most:.0%} of the attention"
    return Finding(name, severity, layers, evidence, meaning, "acutance measure {model} {data} --prefix out")


def outlier_tokens(r: Readings) -> Finding | None:
    """A token's norm is far above the others'."""
    name = "outlier tokens"
    layers, scores = noticed(name, r), score(name, r)
    if not layers:
        return None
    places = np.array(layers) - 1
    first = float(r["outlier_first"][places].mean())
    is_first = first >= 0.5
    severity: Severity = "note" if is_first else "warning" if scores.max() < 50 else "severe"
    what = "it is the first token" if is_first else "it is not the first token"
    evidence = f"{named(layers)}: the largest norm is up to {scores[places].max():.0f} times the median; {what}"
    meaning = "Cosines and norms of such tokens say nothing of the content."
    if r.facts["images"] and not is_first:
        meaning = "High-norm patches: their features describe the image, not the patch. Dense tasks suffer."
    elif is_first:
        meaning = "Usual where attention rests on the first token. Leave that token out of means."
    return Finding(
        name, severity, layers, evidence, meaning, "acutance measure {model} {data} --metrics norm_spread --prefix out"
    )


def patches_rewired(r: Readings) -> Finding | None:
    """A layer changes which patches are alike far more than its neighbours do."""
    name = "patches rewired"
    if not (layers := noticed(name, r)):
        return None
    worst = int(np.nanargmax(score(name, r))) + 1
    drift, middle = r["patch_drift"], float(np.nanmedian(r["patch_drift"]))
    moved = f"layer {worst} moves the cosines between patches by {drift[worst - 1]:.2f} (rms)"
    evidence = f"{moved}, the median layer by {middle:.2f}"
    meaning = "Patches that were alike no longer are, and others have become so. Dense features are lost there."
    return Finding(
        name, "warning", layers, evidence, meaning, "acutance measure {model} {data} --metrics all --prefix out"
    )


def idle_layers(r: Readings) -> Finding | None:
    """Layers that hand on what they were given."""
    name = "idle layers"
    if not (layers := noticed(name, r)):
        return None
    least = float(r["influence"][np.array(layers) - 1].max())
    severity: Severity = "warning" if 3 * len(layers) >= r.layers else "note"
    evidence = f"{named(layers)}: 1 − cosine between input and output is at most {least:.3f}"
    meaning = "Without them the model is smaller and may be as good."
    return Finding(
        name, severity, layers, evidence, meaning, f"acutance diagnose {{model}} {{data}} --prune {len(layers)}"
    )


def idle_head_finding(r: Readings) -> Finding | None:
    """Heads that add nothing, or what another head adds."""
    name = "idle heads"
    if not (layers := noticed(name, r)):
        return None
    dead, twins = 1 - r["head_share"] >= NOTICED[name], r["head_twin"] >= NOTICED[name]
    count, every = int((dead | twins).sum()), int(np.isfinite(r["head_share"]).sum())
    severity: Severity = "warning" if 8 * count >= every else "note"
    evidence = f"{named(layers)}: {int(dead.sum())} heads add nothing, {int(twins.sum())} the same as another"
    meaning = f"{count} of {every} heads could go, or could learn something else."
    return Finding(name, severity, layers, evidence, meaning, "acutance measure {model} {data} --metrics head_cosine")


def attention_to_itself(r: Readings) -> Finding | None:
    """Tokens attend to themselves."""
    name = "attention to itself"
    if not (layers := noticed(name, r)):
        return None
    most = float(score(name, r)[np.array(layers) - 1].mean())
    severity: Severity = "warning" if 2 * len(layers) >= r.layers else "note"
    evidence = f"{named(layers)}: a token gives {most:.0%} of its attention to itself"
    meaning = "Attention is close to the identity: it moves nothing between tokens."
    return Finding(
        name, severity, layers, evidence, meaning, "acutance measure {model} {data} --metrics attention_entropy"
    )


def even_attention(r: Readings) -> Finding | None:
    """All tokens get the same attention."""
    name = "even attention"
    if not (layers := noticed(name, r)):
        return None
    most = float(score(name, r)[np.array(layers) - 1].mean())
    severity: Severity = "warning" if 2 * len(layers) >= r.layers else "note"
    evidence = f"{named(layers)}: entropy is {most:.1%} of that of even attention"
    meaning = "Attention does not choose: it hands every token the mean of all."
    return Finding(name, severity, layers, evidence, meaning, "acutance mitigate {model} attnscale {data}")


def smoothing_weights(r: Readings) -> Finding | None:
    """W_V and W_proj amplify what the tokens share: what one step of even attention would do to log HFC/LFC."""
    name = "smoothing weights"
    layers = noticed(name, r)
    if 2 * len(layers) < np.isfinite(score(name, r)).sum() or not layers:
        return None
    places = np.array(layers) - 1
    evidence = (
        f"{named(layers)}: under even attention log HFC/LFC would change by {r['tendency'][places].mean():.2f} a layer"
    )
    if "attention_change" in r:
        evidence += f"; measured across the attention: {np.nanmean(r['attention_change'][places]):+.2f}"
    meaning = "W_V and W_proj amplify what the tokens share. That is a tendency: what attention does to it, data tell."
    return Finding(name, "note", layers, evidence, meaning, "acutance explain {model}")


DETECTORS: dict[str, Callable[[Readings], Finding | None]] = {
    "tokens alike": tokens_alike,
    "constant attention branch": constant_branch,
    "embeddings alike": embeddings_alike,
    "attention sink": attention_sink,
    "outlier tokens": outlier_tokens,
    "patches rewired": patches_rewired,
    "idle layers": idle_layers,
    "idle heads": idle_head_finding,
    "attention to itself": attention_to_itself,
    "even attention": even_attention,
    "smoothing weights": smoothing_weights,
}


def named(layers: Iterable[int]) -> str:
    """`layer 3`, or `layers 1-4, 7`."""
    ordered = sorted(layers)
    starts = [n for n in ordered if n - 1 not in ordered]
    ends = [n for n in ordered if n + 1 not in ordered]
    spans = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
    return f"layer{'s' if len(ordered) > 1 else ''} {spans}"
