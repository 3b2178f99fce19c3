"""One walk through a model: what visitors see, that they share a forward pass, and how few files it takes."""

import sys
from functools import partialmethod
from pathlib import Path

import numpy as np
import pytest
import torch
from measured_vit import hooks_of, small_images, small_vit

import acutance as ac
from acutance import sites
from acutance.errors import AcutanceError
from acutance.explain.read import LayerReader
from acutance.explain.weights import layer_spectrum
from acutance.lab.studies.kernel import AssumptionReader, kernel_assumptions
from acutance.measure.maps import MapReader
from acutance.measure.reader import MetricReader
from acutance.measure.walk import EVERY, Visitor, walk

DEPTH = 3
NAMES = ["token_cosine", "effective_rank", "attention_entropy", "attention_cosine"]
TAPS = ["block", "attention", "values", "final"]


@pytest.fixture
def model():
    return small_vit(DEPTH)


@pytest.fixture
def batches():
    return list(small_images(5).split(2))


def counted(model):
    """How often the model runs."""
    runs = []
    model.register_forward_pre_hook(lambda *_: runs.append(1))
    return runs


class Seen(Visitor):
    """Writes down what it is told."""

    def __init__(self, **needs):
        self.needs, self.events = needs, []

    def begin(self, batch):
        self.events.append(("begin", tuple(batch.fed.shape)))

    def saw(self, name, layer, tokens):
        self.events.append((name, layer, tuple(tokens.shape)))

    enter, leave, final = partialmethod(saw, "enter"), partialmethod(saw, "leave"), partialmethod(saw, "final")

    def attend(self, layer, call):
        self.saw("attend", layer, call.branch)

    def end(self):
        self.events.append(("end",))


def test_a_visitor_is_told_what_it_asked_for_in_order(model):
    shape = (2, 17, 24)
    seen = Seen(enter=[1], attend=[2], leave=EVERY, final=EVERY)
    walk(model.train(), [torch.randn(2, 1, 8, 8)], seen)
    assert seen.events == [
        ("begin", (2, 1, 8, 8)),
        ("enter", 1, shape),
        ("leave", 1, shape),
        ("attend", 2, shape),
        ("leave", 2, shape),
        ("leave", 3, shape),
        ("final", 3, shape),
        ("end",),
    ]
    assert model.training


def test_only_the_hooks_that_are_needed_are_set(model, batches):
    hooks = []

    class Looks(Visitor):
        def begin(self, batch):
            for block in model.blocks:
                observed = block.attn.observer is not None
                hooks.append((len(block._forward_pre_hooks), len(block._forward_hooks), observed))

    other = Seen(enter=[1], leave=[2], attend=[3])
    walk(model, batches[:1], Looks(), other)
    assert hooks == [(1, 0, False), (0, 1, False), (0, 0, True)]
    assert not hooks_of(model)


def test_visitors_in_one_walk_give_what_they_give_alone(model, batches):
    runs = counted(model)
    profile = ac.measure(model, batches, metrics=NAMES, tap=TAPS, prefix="out", progress=False)
    spectrum = ac.explain(model, batches, prefix="out", progress=False)
    assumptions = kernel_assumptions(model, batches)
    assert len(runs) == 3 * len(batches)
    runs.clear()
    layers = [LayerReader(layer_spectrum(site), site.update, site.layer, "out") for site in sites.find(model)]
    reader, affinities = MetricReader(NAMES, TAPS, "out"), AssumptionReader()
    walk(model, batches, reader, *layers, affinities)
    assert len(runs) == len(batches)
    assert reader.readings() == profile.readings
    for ours, layer in zip(layers, spectrum.layers, strict=True):
        assert repr(ours.result()) == repr(layer.dominance)
    for layer, found in affinities.layers.items():
        expected = assumptions.alignment[layer - 1]
        np.testing.assert_array_equal(torch.cat(found["alignment"]).double().numpy(), expected)


@pytest.fixture
def llama():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": DEPTH}
    return transformers.LlamaModel(transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def words():
    ids = torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_packed_documents_that_see_each_other_are_refused_whoever_reads_attention(llama):
    packed = {"input_ids": torch.randint(0, 50, (1, 6)), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}
    apart = torch.block_diag(torch.ones(3, 3), torch.ones(3, 3)).tril().bool()[None, None]
    llama.set_attn_implementation("eager")
    hidden = torch.zeros(1, 1, 6, 6).masked_fill(~apart, torch.finfo(torch.float32).min)
    across = torch.zeros(1, 1, 6, 6).masked_fill(~torch.ones(6, 6).tril().bool(), torch.finfo(torch.float32).min)
    for visitors in ([], [MapReader([2])]):
        reader = MetricReader(["token_cosine"], ["block"])
        walk(llama, [packed | {"attention_mask": hidden}], reader, *visitors)
        assert reader.readings()[0].count == 2
        with pytest.raises(AcutanceError, match="does not keep such documents apart"):
            walk(llama, [packed | {"attention_mask": across}], MetricReader(["token_cosine"], ["block"]), *visitors)


def test_reading_the_stream_of_a_transformers_model_enters_few_files(llama, monkeypatch):
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    # Once a model of transformers was mitigated, we answer for its function in all of them.
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", sdpa_attention_forward)
    home, measure = str(Path(ac.__file__).parent), ac.measure
    entered = set()

    def enter(frame, event, _arg):
        if event == "call" and frame.f_code.co_filename.startswith(home) and frame.f_code.co_name != "<module>":
            entered.add(frame.f_code.co_filename.removeprefix(home))

    sys.setprofile(enter)
    try:
        measure(llama, [words()], tap="block", progress=False)
    finally:
        sys.setprofile(None)
    # Four of measure, three of sites, two of metrics.
    assert len(entered) <= 9, sorted(entered)
