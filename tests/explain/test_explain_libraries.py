"""explain on models of other libraries: whatever sites finds."""

import numpy as np
import pytest
import torch
from spectrum_worlds import ordered
from torch import nn

import acutance as ac
from acutance.errors import AcutanceWarning
from acutance.explain import Share

WIDTH, TOKENS = 16, 9


def sharpen(model: nn.Module) -> nn.Module:
    """Weights large enough for attention and spectra to be more than nearly nothing."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                parameter.mul_(8)
    return model.eval()


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.05,
    )  # fmt: skip
    return sharpen(transformers.LlamaForCausalLM(config))


def test_grouped_queries_and_rms_norm_of_llama(llama: nn.Module) -> None:
    layer = llama.model.layers[0]
    with torch.no_grad():
        layer.input_layernorm.weight.copy_(torch.linspace(-1, 2, WIDTH))
    value, out = layer.self_attn.v_proj.weight.detach().double(), layer.self_attn.o_proj.weight.detach().double()
    repeated = value.unflatten(0, (2, 4)).repeat_interleave(2, dim=0).flatten(0, 1)  # heads 1, 2 share, and 3, 4
    H = out @ repeated * layer.input_layernorm.weight.detach().double()
    found = ac.explain(llama, progress=False)[1]
    wanted = np.linalg.eigvals(H.numpy())
    wanted[np.abs(wanted) < 1e-6] = 0
    np.testing.assert_allclose(ordered(found.eigenvalues), ordered(wanted), atol=1e-6)


def test_left_padding_changes_nothing(llama: nn.Module) -> None:
    ids = torch.randint(0, 40, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    padded = ac.explain(llama, [{"input_ids": ids, "attention_mask": mask}], progress=False)
    alone = ac.explain(llama, [{"input_ids": ids[:1]}, {"input_ids": ids[1:, 4:]}], progress=False)
    for a, b in zip(padded.layers, alone.layers, strict=True):
        assert a.dominance.predicted == b.dominance.predicted
        assert a.dominance.predicted_change == pytest.approx(b.dominance.predicted_change, abs=1e-5)
        assert a.dominance.branch.change == pytest.approx(b.dominance.branch.change, abs=1e-4)
        np.testing.assert_allclose(a.dominance.mu_min, b.dominance.mu_min, atol=1e-5)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["nowhere", "left", "right"])
def test_long_causal_attention_reads_the_same_under_any_mask(implementation: str, side: str) -> None:
    """Above 512 tokens; masks, not a flag, make it causal where it is eager or padded.

    λ = −2.02: |1 + λ| = 1.02 beats |1 + λμ| for every μ from 0 to 0.99, but not for one of −0.01.
    """
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=600, attn_implementation=implementation,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.v_proj.weight.copy_(torch.eye(WIDTH))
        attention.o_proj.weight.copy_(-2.02 * torch.eye(WIDTH))
        attention.q_proj.weight.mul_(10)
        attention.k_proj.weight.mul_(10)
    ids = torch.randint(0, 40, (2, 540), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    kept = {"nowhere": slice(0, 540), "left": slice(20, 540), "right": slice(0, 520)}[side]
    mask[1] = 0
    mask[1, kept] = 1
    with pytest.warns(AcutanceWarning, match="λ = -2.02 lies beyond"):
        masked = ac.explain(model, [{"input_ids": ids, "attention_mask": mask}], progress=False)[1]
    model.set_attn_implementation("sdpa")
    with pytest.warns(AcutanceWarning, match="λ = -2.02 lies beyond"):
        alone = ac.explain(model, [{"input_ids": ids[:1]}, {"input_ids": ids[1:, kept]}], progress=False)[1]
    assert masked.verdict == alone.verdict == "smoothing"
    assert masked.dominance.predicted == alone.dominance.predicted == Share(1.0, 0.0)
    assert masked.dominance.mu_error == 0
    np.testing.assert_allclose(masked.dominance.mu_min_by_sample, alone.dominance.mu_min_by_sample, atol=1e-6)
    np.testing.assert_allclose(masked.dominance.mu_largest_by_sample, alone.dominance.mu_largest_by_sample, atol=1e-5)
    assert masked.dominance.mu_min_by_sample.min() >= 0


def test_a_norm_before_the_projection_is_told_of(llama: nn.Module) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 40, "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2}
    config = transformers.BitNetConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    found = ac.explain(transformers.BitNetModel(config), progress=False)
    assert "BitNetAttention before W_proj" in found.context["outside H"]
    assert "is not in the spectra" in str(found)
    assert ac.explain(llama, progress=False).context["outside H"] is None


def test_torch_encoders_are_explained() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 24, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    found = ac.explain(model, [torch.randn(3, TOKENS, WIDTH)], progress=False)
    weight = model.layers[0].self_attn.in_proj_weight[-WIDTH:].detach().double()
    H = model.layers[0].self_attn.out_proj.weight.detach().double() @ weight
    np.testing.assert_allclose(ordered(found[1].eigenvalues), ordered(np.linalg.eigvals(H.numpy())), atol=1e-9)
    assert found[2].dominance.samples == 3
