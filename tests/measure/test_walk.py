"""One walk through a model: what visitors see, that they share a forward pass, and how few files it takes."""

import ast
import inspect
import sys
from functools import partialmethod
from pathlib import Path

import numpy as np
import torch

import acutance as ac
from acutance import sites
from acutance.explain.read import LayerReader
from acutance.explain.weights import layer_spectrum
from acutance.lab.studies.kernel import AssumptionReader, kernel_assumptions
from acutance.measure.reader import MetricReader
from acutance.measure.walk import EVERY, Visitor, walk
from acutance.sites import named
from sites import hf_zoo
from sites.tiny_models import left_alone

NAMES = ["token_cosine", "effective_rank", "attention_entropy", "attention_cosine"]
TAPS = ["block", "attention", "values", "final"]


class Seen(Visitor):
    def __init__(self, **needs):
        self.needs, self.events = needs, []

    def begin(self, batch):
        attention = [block.attn for block in batch.model.blocks]
        hooks = [(len(block._forward_pre_hooks), len(block._forward_hooks)) for block in batch.model.blocks]
        self.events += [("begin", tuple(batch.fed.shape)), hooks, [a.observer is not None for a in attention]]

    def saw(self, name, layer, seen):
        self.events.append((name, layer, tuple(getattr(seen, "branch", seen).shape)))

    enter, leave, final = partialmethod(saw, "enter"), partialmethod(saw, "leave"), partialmethod(saw, "final")
    attend = partialmethod(saw, "attend")

    def end(self):
        self.events.append(("end",))


def test_a_visitor_is_told_what_it_asked_for_in_order_by_no_more_hooks(model):
    shape = (2, 18, 24)
    seen = Seen(enter=[1], attend=[2], leave=(1, 3), final=EVERY)
    with left_alone(model.train()):
        walk(model, [torch.randn(2, 1, 8, 8)], seen)
    assert seen.events == [
        ("begin", (2, 1, 8, 8)),
        [(1, 1), (0, 0), (0, 1)],
        [False, True, False],
        ("enter", 1, shape),
        ("leave", 1, shape),
        ("attend", 2, shape),
        ("leave", 3, shape),
        ("final", 3, shape),
        ("end",),
    ]


def test_visitors_in_one_walk_give_what_they_give_alone(model, images):
    batches = list(images.split(3))
    runs = []
    model.register_forward_pre_hook(lambda *_: runs.append(1))
    profile = ac.measure(model, batches, metrics=NAMES, tap=TAPS, prefix="out", progress=False)
    spectrum = ac.explain(model, batches, prefix="out", progress=False)
    assumptions = kernel_assumptions(model, batches)
    assert len(runs) == 3 * len(batches)
    runs.clear()
    layers = [LayerReader(layer_spectrum(site), site, site.layer, "out") for site in sites.find(model)]
    reader, affinities = MetricReader(NAMES, TAPS, "out"), AssumptionReader()
    walk(model, batches, reader, *layers, affinities)
    assert len(runs) == len(batches)
    assert reader.readings() == profile.readings
    for ours, layer in zip(layers, spectrum.layers, strict=True):
        assert repr(ours.result()) == repr(layer.dominance)
    for layer, found in affinities.layers.items():
        expected = assumptions.alignment[layer - 1]
        np.testing.assert_array_equal(torch.cat(found["alignment"]).double().numpy(), expected)


def test_reading_the_stream_of_a_transformers_model_enters_few_files(monkeypatch):
    """And looks at no weight and no source."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    # Once a model of transformers was mitigated, we answer for its function in all of them.
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", sdpa_attention_forward)
    llama, words = hf_zoo.build("llama"), [hf_zoo.batch("llama", padded=False)]
    home, measure, entered = str(Path(ac.__file__).parent), ac.measure, set()
    sys.setprofile(lambda frame, event, _: event == "call" and entered.add(frame.f_code))
    try:
        measure(llama, words, tap="block", progress=False)
    finally:
        sys.setprofile(None)
    ours = {code.co_filename for code in entered if code.co_filename.startswith(home) and code.co_name != "<module>"}
    assert len(ours) <= 10, sorted(ours)  # four of measure, four of sites, two of metrics
    looking = {named.discover, named.NamedSite.output_projection, inspect.getsource, ast.parse}
    assert not entered & {inspect.unwrap(function).__code__ for function in looking}
