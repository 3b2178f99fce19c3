"""What stands at the ends of a model's content: one place says it for every library."""

import hf_zoo
import pytest
import torch
from torch import nn

import acutance as ac
from acutance import sites
from acutance.errors import AcutanceError
from acutance.sites.structure import SpecialTokens, tokens_by_name


def test_special_tokens_are_told_by_the_names_of_their_parameters():
    def named(**shapes):
        return [(f"embeddings.{name}", torch.zeros(shape)) for name, shape in shapes.items()]

    assert tokens_by_name([]) == (0, 0)
    assert tokens_by_name(named(mask_token=(1, 1, 8), position_embeddings=(1, 17, 8))) == (0, 0)
    assert tokens_by_name(named(class_embedding=(8,))) == (1, 0)
    assert tokens_by_name(named(cls_token=(1, 1, 8), register_tokens=(1, 4, 8))) == (5, 0)
    assert tokens_by_name(named(cls_register_token=(10, 8))) == (10, 0)
    assert tokens_by_name(named(cls_token=(1, 1, 8), detection_tokens=(1, 100, 8))) == (1, 100)
    assert str(SpecialTokens(1, 100)) == "1 prefix and 100 trailing tokens"
    assert str(SpecialTokens(1)) == "1 prefix tokens"


NORMS = {
    "vit": "layernorm",
    "yolos": "layernorm",
    "llama": "norm",
    "gpt2": "ln_f",
    "opt": "decoder.final_layer_norm",  # defined before the blocks
    "t5_encoder": "encoder.final_layer_norm",
    "modernbert": "final_norm",
    "swin": "layernorm",
    "segformer": "stages.1.layer_norm",  # of the last stage
}


@pytest.mark.parametrize("name", NORMS)
def test_the_final_norm_of_transformers(name):
    pytest.importorskip("transformers")
    model = hf_zoo.build(name)
    assert sites.final_norm(model) is model.get_submodule(NORMS[name])


def test_a_post_norm_model_has_no_final_norm():
    pytest.importorskip("transformers")
    with pytest.raises(AcutanceError, match=r"BertModel has no norm after its last block.*read tap='block'"):
        sites.final_norm(hf_zoo.build("bert"))


def test_the_ends_are_found_around_a_part_that_is_patched_already():
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.norm = nn.LayerNorm(8)

        def forward(self, x):
            return self.norm(self.body(x))

    model, x = Classifier().eval(), torch.randn(2, 5, 8)
    with ac.mitigate(model.body, "neutreno:0.6"):  # its sites are named from there
        assert sites.final_norm(model) is model.norm
        profile = ac.measure(model, [x], metrics="token_cosine", tap="final", progress=False)
        expected = ac.metrics.token_cosine(model(x)).mean().item()
    assert profile["token_cosine"].tolist() == pytest.approx([expected])
