"""What is passed by, refused or noticed in models made of nn.MultiheadAttention."""

import pytest
import torch
from torch import nn
from torch_nn_models import DIM, HEADS, PostNorm, SelfAttention, WithPositions, encoder, shaken, tokens

from acutance import sites
from acutance.errors import AcutanceError
from acutance.measure import measure
from acutance.sites.mitigate import mitigate


class LooksAtMemory(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def forward(self, x):
        memory = x.flip(1)
        return x + self.attn(x, memory, memory)[0]


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.columns = SelfAttention(True), SelfAttention(True)

    def forward(self, x):
        return x + self.columns(self.rows(x))


class MoreKeys(PostNorm):
    def __init__(self, **options):
        super().__init__()
        self.attention.mha = nn.MultiheadAttention(DIM, HEADS, batch_first=True, **options)


class Halves(nn.Module):
    """Attends within each half of the tokens."""

    def __init__(self):
        super().__init__()
        self.attention = SelfAttention(True)

    def forward(self, x):
        windows = torch.cat(x[:, :4].chunk(2, dim=1))
        return x[:, :4] + torch.cat(self.attention(windows).chunk(2), dim=1)


class Shorter(PostNorm):
    def forward(self, x):
        return super().forward(x)[:, 1:]


class Skips(nn.Module):
    """Runs some of its blocks, as LayerDrop does, or one more than once."""

    def __init__(self, *run, depth=3):
        super().__init__()
        self.blocks, self.run = nn.ModuleList(PostNorm() for _ in range(depth)), run

    def forward(self, x):
        for layer in self.run:
            x = self.blocks[layer](x)
        return x


def several(block, **options):
    return nn.Sequential(block(**options), block(**options))


def lists():
    return nn.ModuleList(nn.ModuleList([SelfAttention(True), nn.Linear(DIM, DIM)]) for _ in range(2))


REFUSED = {  # by `mitigate`: the model, the mitigation, and what is said
    "bias_kv": (lambda: several(MoreKeys, add_bias_kv=True), "neutreno:0.6", "a key that is no token"),
    "zero_attn": (lambda: several(MoreKeys, add_zero_attn=True), "neutreno:0.6", "a key that is no token"),
    "two attentions": (lambda: several(Twice), "featscale", r"several attentions \(0\.rows\.mha, 0\.columns\.mha\)"),
    "outside of the list": (
        *(lambda: nn.ModuleDict({"start": encoder().layers[0], "layers": encoder().layers}), "featscale"),
        r"start\.self_attn is in a block like those of layers, but outside",
    ),
    "lists for blocks": (
        *(lambda: nn.ModuleDict({"layers": lists()}), "featscale"),
        r"layers\.0 is a list of modules without a forward",
    ),
    "stages": (
        *(lambda: nn.ModuleList([encoder(2), encoder(2)]), "neutreno:0.6"),
        r"stages \(0\.layers, 1\.layers\).*part='0\.layers'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_stays_as_it_was_and_its_tokens_are_measured(case):
    make, spec, match = REFUSED[case]
    model = make().double()
    runs = isinstance(model, nn.Sequential)
    before = model(tokens()) if runs else None
    with pytest.raises(AcutanceError, match=match):
        mitigate(model, spec)
    if runs:
        assert torch.equal(model(tokens()), before)
        assert {r.layer for r in measure(model, [tokens()], progress=False).readings} == {0, 1, 2}


def test_first_values_are_those_of_a_stage():
    model = nn.ModuleList([encoder(2), encoder(2)])
    assert len(sites.find(model)) == 4
    mitigate(model, "attnscale").remove()
    mitigate(model[1], "neutreno:0.6").remove()


WINDOWS = "rearranges it for its attention into a batch of 8"
REFUSED_RUNNING = [
    *((lambda: several(Halves), spec, WINDOWS) for spec in ("neutreno:0.6", "featscale", "attnscale+featscale")),
    (lambda: several(Shorter), "neutreno:0.6", "not of the same tokens"),
    (lambda: Skips(1, 2), "neutreno:0.6", "first layer has"),
    (lambda: Skips(0, 0, 0, depth=1), "neutreno:0.6", "ran more than once"),
]


@pytest.mark.parametrize(("make", "spec", "match"), REFUSED_RUNNING)
def test_tokens_that_are_not_those_of_the_first_layer_are_refused(make, spec, match):
    model = make().double()
    with mitigate(model, spec), pytest.raises(AcutanceError, match=match):
        model(tokens())
    with mitigate(model, "attnscale"):  # which needs no others
        model(tokens())


def test_a_block_that_is_skipped_is_none_of_the_pass():
    torch.manual_seed(0)
    model = Skips(0, 2).double()
    without = nn.Sequential(model.blocks[0], model.blocks[2])
    with mitigate(model, "neutreno:0.6"):
        found = model(tokens())
    with mitigate(without, "neutreno:0.6"):
        assert torch.equal(found, without(tokens()))


def test_cross_attention_passes_through_and_is_not_mitigated():
    model = nn.Sequential(shaken(WithPositions()), shaken(LooksAtMemory())).double()
    before = model(tokens())
    records = []
    handles = [site.observe(records.append) for site in sites.find(model)]
    assert torch.equal(model(tokens()), before)
    assert len(records) == 1
    for handle in handles:
        handle.remove()
    match = r"1\.attn is called as cross-attention.*leave layer 2 out"
    with mitigate(model, "featscale"), pytest.raises(AcutanceError, match=match):
        model(tokens())
    with mitigate(model, "featscale", layers=[1]):
        assert torch.equal(model(tokens()), before)


def test_nested_tensors_are_refused():
    model = encoder().eval()
    nested = torch.nested.nested_tensor([tokens()[0], tokens()[1, :3]])
    refused = pytest.raises(AcutanceError, match="nested tensor: pass a padded one")
    with mitigate(model.layers[0], "featscale"), torch.no_grad(), refused:
        model.layers[0](nested)
