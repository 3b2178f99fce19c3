"""What is passed by, refused or noticed in models made of nn.MultiheadAttention."""

import pytest
import torch
from torch import nn
from torch_nn_models import DIM, HEADS, PostNorm, SelfAttention, WithPositions, encoder, shaken, tokens

from acutance import sites
from acutance.errors import AcutanceError, ShapeError
from acutance.measure import measure
from acutance.sites.mitigate import mitigate


class LooksAtMemory(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def forward(self, x):
        memory = x.flip(1)
        return x + self.attn(x, memory, memory)[0]


def test_cross_attention_passes_through_and_is_not_mitigated():
    model = nn.Sequential(shaken(WithPositions()), shaken(LooksAtMemory())).double()
    before = model(tokens())
    records = []
    handles = [site.observe(records.append) for site in sites.find(model)]
    assert torch.equal(model(tokens()), before)
    assert len(records) == 1
    for handle in handles:
        handle.remove()
    with (
        mitigate(model, "featscale"),
        pytest.raises(AcutanceError, match=r"1\.attn is called as cross-attention.*leave layer 2 out"),
    ):
        model(tokens())
    with mitigate(model, "featscale", layers=[1]):
        assert torch.equal(model(tokens()), before)


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_keys_that_are_no_tokens_are_refused(options):
    class Holder(PostNorm):
        def __init__(self):
            super().__init__()
            self.attention.mha = nn.MultiheadAttention(DIM, HEADS, batch_first=True, **options)

    model = nn.Sequential(Holder(), Holder()).double()
    before = model(tokens())
    with pytest.raises(AcutanceError, match="a key that is no token"):
        mitigate(model, "neutreno:0.6")
    assert torch.equal(model(tokens()), before)
    assert ("block", 2, "token_cosine") in {
        (r.tap, r.layer, r.metric) for r in measure(model, [tokens()], progress=False).readings
    }


def test_an_attention_with_a_forward_of_its_own_is_refused():
    class Special(nn.MultiheadAttention):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    with pytest.raises(AcutanceError, match=r"Special\) has a forward of its own"):
        mitigate(Special(DIM, HEADS), "featscale")


def test_two_self_attentions_in_a_block_are_refused_but_tokens_are_measured():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows, self.columns = SelfAttention(True), SelfAttention(True)

        def forward(self, x):
            return x + self.columns(self.rows(x))

    model = nn.Sequential(Twice(), Twice()).double()
    with pytest.raises(AcutanceError, match=r"holds several attentions \(0\.rows\.mha, 0\.columns\.mha\)"):
        mitigate(model, "featscale")
    assert {r.layer for r in measure(model, [tokens()], progress=False).readings} == {0, 1, 2}


def test_a_layer_outside_of_the_list_of_its_equals_is_refused():
    model = nn.ModuleDict({"start": encoder().layers[0], "layers": encoder().layers})
    with pytest.raises(AcutanceError, match=r"start\.self_attn is in a block like those of layers, but outside"):
        sites.find(model)


def test_lists_in_place_of_blocks_are_refused():
    model = nn.ModuleDict(
        {"layers": nn.ModuleList(nn.ModuleList([SelfAttention(True), nn.Linear(DIM, DIM)]) for _ in range(2))}
    )
    with pytest.raises(AcutanceError, match=r"layers\.0 is a list of modules without a forward"):
        sites.find(model)


def test_first_values_of_another_stage_are_refused():
    model = nn.ModuleList([encoder(2), encoder(2)])
    assert len(sites.find(model)) == 4
    with pytest.raises(AcutanceError, match=r"stages \(0\.layers, 1\.layers\).*part='0\.layers'"):
        mitigate(model, "neutreno:0.6")
    mitigate(model, "attnscale").remove()
    mitigate(model[1], "neutreno:0.6").remove()


class Halves(nn.Module):
    """Attends within each half of the tokens."""

    def __init__(self):
        super().__init__()
        self.attention = SelfAttention(True)

    def forward(self, x):
        windows = torch.cat(x.chunk(2, dim=1))
        return x + torch.cat(self.attention(windows).chunk(2), dim=1)


@pytest.mark.parametrize("spec", ["neutreno:0.6", "featscale", "attnscale+featscale"])
def test_windows_are_refused_first_values_and_means(spec):
    model = nn.Sequential(Halves(), Halves()).double()
    with mitigate(model, spec), pytest.raises(ShapeError, match="rearranges it for its attention into a batch of 8"):
        model(tokens()[:, :4])
    with mitigate(model, "attnscale"):
        model(tokens()[:, :4])


class Shorter(PostNorm):
    def forward(self, x):
        return super().forward(x)[:, 1:]


def test_tokens_that_are_dropped_are_refused():
    model = nn.Sequential(Shorter(), Shorter()).double()
    with mitigate(model, "neutreno:0.6"), pytest.raises(ShapeError, match="not of the same tokens"):
        model(tokens())


def test_nested_tensors_and_hints_without_a_mask_are_refused():
    model = encoder().eval()
    nested = torch.nested.nested_tensor([tokens()[0], tokens()[1, :3]])
    with mitigate(model.layers[0], "featscale"):
        with torch.no_grad(), pytest.raises(AcutanceError, match="nested tensor: pass a padded one"):
            model.layers[0](nested)
        with pytest.raises(AcutanceError, match="is_causal is a hint about attn_mask"):
            model.layers[0](tokens(), is_causal=True)


class Skips(nn.Module):
    """Runs some of its three blocks, as LayerDrop does."""

    def __init__(self, *run):
        super().__init__()
        self.blocks, self.run = nn.ModuleList([PostNorm(), PostNorm(), PostNorm()]), run

    def forward(self, x):
        for layer in self.run:
            x = self.blocks[layer](x)
        return x


def test_a_block_that_is_skipped_is_none_of_the_pass():
    torch.manual_seed(0)
    model, without = Skips(0, 2).double(), nn.Sequential(PostNorm(), PostNorm()).double()
    without[0].load_state_dict(model.blocks[0].state_dict())
    without[1].load_state_dict(model.blocks[2].state_dict())
    with mitigate(model, "neutreno:0.6"), mitigate(without, "neutreno:0.6"):
        assert torch.equal(model(tokens()), without(tokens()))


def test_without_the_first_block_there_are_no_first_values():
    with mitigate(model := Skips(1, 2).double(), "neutreno:0.6"), pytest.raises(AcutanceError, match="first layer has"):
        model(tokens())
    with mitigate(model, "attnscale"):
        model(tokens())


def test_layers_that_share_a_module_are_refused_where_the_first_matters():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)])

        def forward(self, x):
            for _ in range(3):
                x = self.layers[0](x)
            return x

    model, x = Shared(), torch.randn(2, 5, 8)
    with mitigate(model, "neutreno:0.6"), pytest.raises(AcutanceError, match="ran more than once"):
        model(x)
    with mitigate(model, "attnscale"):
        model(x)
