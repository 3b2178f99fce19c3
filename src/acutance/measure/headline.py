"""What a profile shows, in a sentence that is computed from it."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from acutance.metrics.sums import MEANINGS
from acutance.report.tables import short

if TYPE_CHECKING:
    from acutance.measure.profile import MetricValue, Profile

WHOSE = {"attention": "Tokens of the attention branch", "values": "Values", "attention_matrix": "Attention"}  # by tap
SMALL = 0.05  # of the metric's range, or of its size where that has no end: a change below it is called none


def higher_is(metric: str) -> str:
    """Where tokens go as the metric grows: smoother, sharper, or neither, which is also said of unknown ones."""
    return MEANINGS[metric].higher if metric in MEANINGS else "neither"


def main_curve(profile: "Profile") -> "list[MetricValue]":
    """The one metric, by depth, that tells best how smooth the model is; empty if none is finite in every layer.

    The token cosine of the stream, or else of another tap; then other metrics of tokens in the order they were read.
    """
    curves = [profile.select(*key) for key in dict.fromkeys((r.metric, r.tap) for r in profile.readings)]

    def rank(curve: "list[MetricValue]") -> tuple[bool, ...]:
        metric, tap = curve[0].metric, curve[0].tap
        return higher_is(metric) == "neither", tap == "attention_matrix", metric != "token_cosine", tap != "block"

    return min((curve for curve in curves if all(math.isfinite(r.mean) for r in curve)), key=rank, default=[])


def is_small(change: float, metric: str, *values: float) -> bool:
    """Whether a change of a metric from or to such values is too small to speak of."""
    low, high = MEANINGS[metric].range if metric in MEANINGS else (0, math.inf)
    scale = max(map(abs, values), default=1.0) if math.isinf(high - low) else 1.0
    return abs(change) <= SMALL * scale


def direction(change: float, metric: str, *values: float) -> int:
    """1 if this change of a metric is towards smoother tokens, −1 if to sharper ones, 0 if it is small."""
    rise = 0 if is_small(change, metric, *values) else 1 if change > 0 else -1
    return {"smoother": rise, "sharper": -rise}.get(higher_is(metric), 0)


def headline_of(curve: "Sequence[MetricValue]") -> str:
    """For example: Tokens grow alike with depth: token_cosine 0.12 → 0.71 over 12 layers, most in layers 2 to 4."""
    if not curve:
        return ""
    first, last = curve[0], curve[-1]
    metric, whose = first.metric, WHOSE.get(first.tap, "Tokens")
    if first is last:
        return f"{whose} after layer {last.layer}: {metric} {short(last.mean)}."
    ends = first.mean, last.mean
    change = ends[1] - ends[0]
    if higher_is(metric) == "neither" or first.tap == "attention_matrix":
        moves = "stays about the same" if is_small(change, metric, *ends) else "falls" if change < 0 else "rises"
        text = f"{metric} {moves} with depth:"
    else:
        words = ("stay about as alike", "grow alike", "grow apart")[direction(change, metric, *ends)]
        text = f"{whose} {words} with depth: {metric}"
    over = (
        f"over {last.layer} layer{'s'[: last.layer - 1]}"
        if first.layer == 0
        else f"from layer {first.layer} to {last.layer}"
    )
    return f"{text} {short(ends[0])} → {short(ends[1])} {over}{_detail(curve)}."


def _detail(curve: "Sequence[MetricValue]") -> str:
    """The reading furthest outside of what the ends span, or else the few layers that make most of the change."""
    values, metric = [r.mean for r in curve], curve[0].metric
    low, high = sorted((values[0], values[-1]))
    furthest = max(curve, key=lambda r: max(low - r.mean, r.mean - high))
    beyond = max(low - furthest.mean, furthest.mean - high)
    if not is_small(beyond, metric, *values):
        return f", but {short(furthest.mean)} after layer {furthest.layer}"
    change, count = values[-1] - values[0], len(curve) - 1
    if is_small(change, metric, low, high):
        return ""
    for length in range(1, count // 3 + 1):
        shares = [(values[i + length] - values[i]) / change for i in range(count - length + 1)]
        if max(shares) > 0.5:
            start = shares.index(max(shares))
            a, b = curve[start + 1].layer, curve[start + length].layer
            return f", most in layer {a}" if a == b else f", most in layers {a} to {b}"
    return ""
