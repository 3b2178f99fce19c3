"""What can be wrong with a model: each detector is a small function of the readings, with its threshold in sight.

A detector has a score per layer, and names the layers that reach its threshold; how bad that is, its function says.
The thresholds were chosen on models with planted faults and tried on others: see docs/diagnose.md.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from acutance.diagnose.readings import Numbers, Readings

Severity = Literal["ok", "note", "warning", "severe"]
Told = tuple[Severity, str, str, str]  # severity, evidence, meaning and advice
Tell = Callable[[Readings, tuple[int, ...], Numbers], Told]  # given the layers found and their scores
Where = Callable[[Readings], tuple[int, ...]]
SEVERITIES: tuple[Severity, ...] = ("ok", "note", "warning", "severe")
MOST = 7  # findings in a diagnosis
FEW_SAMPLES, FEW_TOKENS = 4, 8  # below these the samples' embeddings, or the share of one token, say nothing
PARTS = {"attention": "attention", "mlp": "the MLP", "rest": "what follows attention"}  # of a block, in words
PARTS |= {"norm1": "the norm after attention", "norm2": "the norm after the MLP"}
SWEEP = "acutance sweep {model} {data} --remedies all"
MEASURE = "acutance measure {model} {data} "


@dataclass(frozen=True)
class Finding:
    """One thing that was found."""

    name: str
    severity: Severity
    layers: tuple[int, ...]
    evidence: str
    meaning: str
    advice: str  # a command, in which {model} and {data} stand for what was diagnosed


@dataclass
class Detector:
    """What tells one kind of fault; decorates the function that says what was found."""

    name: str
    threshold: float
    needs: str  # curves of the readings
    score: Callable[[Readings], Numbers]
    least: float = 0  # share of the layers that must reach the threshold
    where: Where | None = None  # the layers to name, if not those that reach it

    def __call__(self, tell: Tell) -> Tell:
        self.tell, DETECTORS[self.name] = tell, self
        return tell


DETECTORS: dict[str, Detector] = {}


def findings(readings: Readings) -> list[Finding]:
    """What was found, the worst first."""
    found = [finding for name in DETECTORS if (finding := detect(name, readings)) is not None]
    return sorted(found, key=lambda finding: -SEVERITIES.index(finding.severity))[:MOST]


def detect(name: str, readings: Readings) -> Finding | None:
    """What one detector finds."""
    scores, known = score(name, readings), DETECTORS[name]
    reached = scores >= known.threshold
    if not reached.any() or reached.sum() < known.least * np.isfinite(scores).sum():
        return None
    layers = tuple((np.flatnonzero(reached) + 1).tolist()) if known.where is None else known.where(readings)
    severity, *words = known.tell(readings, layers, scores[reached])
    return Finding(name, severity, layers, *words)


def score(name: str, readings: Readings) -> Numbers:
    """The score of a detector per layer; NaN where it has nothing to go by."""
    known = DETECTORS[name]
    is_read = all(key in readings for key in known.needs.split())
    return known.score(readings) if is_read else np.full(readings.layers, np.nan)


def where_it_rose(r: Readings) -> tuple[int, ...]:
    """The fewest layers that make up half of all that the tokens' cosine rose."""
    rises = np.maximum(np.diff(r["cosine"]), 0).round(6)  # equal steps by depth
    order = np.argsort(-rises, kind="stable")
    count = int(np.searchsorted(np.cumsum(rises[order]), rises.sum() / 2)) + 1
    return tuple(sorted((order[:count] + 1).tolist()))


@Detector("tokens alike", 0.5, "cosine", lambda r: r["cosine"][-1:], where=where_it_rose)
def tokens_alike(r: Readings, layers: tuple[int, ...], scores: Numbers) -> Told:
    """Tokens point the same way after the last layer."""
    start, end = r["cosine"][[0, -1]]
    where = f"{start:.2f} before layer 1, half of the rise in {named(layers)}{by_part(r, layers)}"
    meaning = "The layers bring the tokens together: over-smoothing, if what is lost was needed."
    if end - start < 0.1:
        where, meaning = f"{start:.2f} before layer 1", "The tokens are alike before the first layer."
    severity: Severity = "note" if end < 0.8 else "warning" if end < 0.95 else "severe"
    if severity == "note":
        meaning = "Trained models that work well reach this too. Whether a remedy gains quality, a sweep tells."
    return severity, f"mean cosine of tokens {end:.2f} after the last layer; {where}", meaning, SWEEP


def by_part(r: Readings, layers: Sequence[int]) -> str:
    """The part of these layers that brought the tokens together most, by the change of log HFC/LFC."""
    sums = {name: np.nansum(r[f"change by {name}"][np.array(layers) - 1]) for name in PARTS if f"change by {name}" in r}
    part = min(sums, key=sums.__getitem__, default=None)
    return "" if part is None or sums[part] >= 0 else f", by {PARTS[part]}"


@Detector("constant attention branch", 0.8, "branch_residual", lambda r: 1 - r["branch_residual"], least=0.5)
def constant_branch(r: Readings, layers: tuple[int, ...], scores: Numbers) -> Told:
    """The attention branch adds nearly the same to every token: rank collapse, as at initialisation."""
    evidence = f"{named(layers)}: {np.median(scores):.0%} of what attention adds is the same for all tokens"
    meaning = (
        "Attention averages over all tokens. At the start of training that is usual; after it, attention is unused."
    )
    return "warning", evidence, meaning, SWEEP


def samples_alike(r: Readings) -> Numbers:
    """The mean cosine between samples at the end, as the last layer's."""
    known = r["pooled_cosine"][-1] if r.facts["samples"] >= FEW_SAMPLES else np.nan
    return np.append(np.full(r.layers - 1, np.nan), known)


@Detector("embeddings alike", 0.9, "pooled_cosine", samples_alike)
def embeddings_alike(r: Readings, layers: tuple[int, ...], scores: Numbers) -> Told:
    """The samples' mean tokens point the same way at the end."""
    end, rank, before = scores[0], r["pooled_rank"][-1], np.min(r["pooled_cosine"][1:-1], initial=1.0)
    severity: Severity = "note" if r.facts["causal"] else "severe" if end > 0.99 else "warning"
    evidence = f"mean cosine of mean-pooled samples {end:.2f}, RankMe {rank:.1f} of {r.facts['samples']} samples"
    if before < 0.9:
        evidence += f"; in the layers before the cosine is down to {before:.2f}"
    meaning = "Cosines between embeddings hardly tell texts or images apart."
    if r.facts["causal"]:
        meaning += " Usual in language models; it matters if you use their embeddings."
    return severity, evidence, meaning, MEASURE + "--tap block"


def most_attended(r: Readings) -> Numbers:
    """The share of attention of the most attended token, mean over heads."""
    return heads_mean(r["top"]) if r.facts["tokens"] >= FEW_TOKENS else np.full(r.layers, np.nan)


@Detector("attention sink", 0.3, "top first", most_attended)
def attention_sink(r: Readings, layers: tuple[int, ...], scores: Numbers) -> Told:
    """One token gets much of the attention."""
    most, first = scores.mean(), heads_mean(r["first"])[np.array(layers) - 1].mean()
    whom = "the first token gets" if first > 0.8 * most else "one token gets"
    evidence = f"{named(layers)}: {whom} {most:.0%} of the attention"
    if (scores >= 0.9).sum() > r.layers / 2:
        return "warning", evidence, "Hardly any attention is left for the content.", SWEEP
    meaning = "Heads rest on a token when they have nothing to add: usual in trained models."
    return "note", evidence, meaning, MEASURE + "--prefix out"


@Detector("outlier tokens", 5.0, "norm_outlier outlier_first", lambda r: r["norm_outlier"])
def outlier_tokens(r: Readings, layers: tuple[int, ...], scores: Numbers) -> Told:
    """A token's norm is far above the others'."""
    is_first = r["outlier_first"][np.array(layers) - 1].mean() >= 0.5
    evidence = f"{named(layers)}: the largest norm is up to {scores.max():.0f} times the median"
    advice = MEASURE + "--metrics norm_spread --prefix out"
    if is_first:
        meaning = "Usual where attention rests on the first token. Leave that token out of means."
        return "note", f"{evidence}; it is the first token", meaning, advice
    meaning = "Cosines and norms of such tokens say nothing of the content."
    if r.facts["images"]:
        meaning = "High-norm patches: their features describe the image, not the patch. Dense tasks suffer."
    return "warning", f"{evidence}; it is not the first token", meaning, advice


def jumps(r: Readings) -> Numbers:
    """How much further a layer moves the patches' cosines than the layers do at the median, from the third layer on.

    The first two arrange the patches anew in healthy models too.
    """
    drift = r["patch_drift"]
    return np.where(np.arange(len(drift)) < 2, np.nan, drift / max(np.nanmedian(drift), 0.02))


@Detector("patches rewired", 2.5, "patch_drift", jumps)
def patches_rewired(r: Readings, layers: tuple[int, ...], scores: Numbers) -> Told:
    """A layer changes which patches are alike far more than its neighbours do."""
    most, middle = r["patch_drift"][np.array(layers) - 1].max(), np.nanmedian(r["patch_drift"])
    evidence = f"{named(layers)}: cosines between patches move by up to {most:.2f} (rms), at the median by {middle:.2f}"
    meaning = "Patches that were alike no longer are, and others have become so: dense features are lost there."
    return "warning", evidence, meaning, MEASURE + "--metrics token_cosine,effective_rank --prefix out"


@Detector("idle layers", 0.985, "influence", lambda r: 1 - r["influence"])
def idle_layers(r: Readings, layers: tuple[int, ...], scores: Numbers) -> Told:
    """Layers that hand on what they were given."""
    severity: Severity = "warning" if 3 * len(layers) >= r.layers else "note"
    evidence = f"{named(layers)}: 1 − cosine between input and output is at most {1 - scores.min():.3f}"
    if "attention_cosine" in r:
        alike = np.nanmean(r["attention_cosine"][np.array(layers) - 1])
        evidence += "" if np.isnan(alike) else f"; attention maps have cosine {alike:.2f} with the layer before"
    meaning = "Without them the model is smaller and may be as good."
    return severity, evidence, meaning, f"acutance diagnose {{model}} {{data}} --prune {min(len(layers), r.layers - 1)}"


def idleness(r: Readings) -> Numbers:
    """Of each head: how little it adds (1 − its share of the mean norm), or how much another head adds the same."""
    return np.fmax(1 - r["head_share"], r["head_twin"])


@Detector("idle heads", 0.955, "head_share head_twin", lambda r: np.nan_to_num(idleness(r), nan=-np.inf).max(1))
def idle_heads(r: Readings, layers: tuple[int, ...], scores: Numbers) -> Told:
    """Heads that add nothing, or what another head adds."""
    threshold = DETECTORS["idle heads"].threshold
    dead, twins = 1 - r["head_share"] >= threshold, r["head_twin"] >= threshold
    count, every = int((dead | twins).sum()), int(np.isfinite(r["head_share"]).sum())
    evidence = f"{named(layers)}: {dead.sum()} heads add nothing, {twins.sum()} the same as another"
    meaning = f"{count} of {every} heads could go, or could learn something else."
    return "warning" if 8 * count >= every else "note", evidence, meaning, MEASURE + "--metrics head_cosine"


@Detector("attention to itself", 0.42, "own", lambda r: heads_mean(r["own"]))
def attention_to_itself(r: Readings, layers: tuple[int, ...], scores: Numbers) -> Told:
    """Tokens attend to themselves."""
    evidence = f"{named(layers)}: a token gives {scores.mean():.0%} of its attention to itself"
    meaning = "Attention is close to the identity: it moves little between tokens."
    severity: Severity = "warning" if 2 * len(layers) >= r.layers else "note"
    return severity, evidence, meaning, MEASURE + "--metrics attention_entropy"


@Detector("even attention", 0.985, "evenness", lambda r: heads_mean(r["evenness"]))
def even_attention(r: Readings, layers: tuple[int, ...], scores: Numbers) -> Told:
    """All tokens get the same attention."""
    evidence = f"{named(layers)}: entropy is {scores.mean():.1%} of that of even attention"
    meaning = "Attention does not choose: it hands every token the mean of all."
    return "warning" if 2 * len(layers) >= r.layers else "note", evidence, meaning, SWEEP


@Detector("smoothing weights", 0.14, "tendency", lambda r: -r["tendency"], least=0.5)
def smoothing_weights(r: Readings, layers: tuple[int, ...], scores: Numbers) -> Told:
    """W_V and W_proj amplify what the tokens share: what one step of even attention would do to log HFC/LFC."""
    evidence = f"{named(layers)}: under even attention log HFC/LFC would change by {-scores.mean():+.2f} a layer"
    if "change by attention" in r:
        evidence += f"; measured across attention: {np.nanmean(r['change by attention'][np.array(layers) - 1]):+.2f}"
    meaning = "W_V and W_proj amplify what the tokens share. That is a tendency; the data tell what comes of it."
    return "note", evidence, meaning, "acutance explain {model}"


def heads_mean(values: Numbers) -> Numbers:
    """The mean over heads; NaN in a layer that was not read."""
    seen = ~np.isnan(values)
    means = np.where(seen, values, 0).sum(1) / np.maximum(seen.sum(1), 1)
    return np.asarray(np.where(seen.any(1), means, np.nan))


def named(layers: Iterable[int]) -> str:
    """`layer 3`, or `layers 1-4, 7`."""
    ordered = sorted(layers)
    starts = [n for n in ordered if n - 1 not in ordered]
    ends = [n for n in ordered if n + 1 not in ordered]
    spans = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
    return f"layer{'s' if len(ordered) > 1 else ''} {spans}"
