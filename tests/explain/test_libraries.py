import numpy as np
import pytest
import torch
from spectrum_worlds import assert_same_eigenvalues
from torch import nn

import acutance as ac
from acutance.errors import AcutanceError, AcutanceWarning
from acutance.explain import Share
from sites import hf_zoo

WIDTH = 32


def test_grouped_queries_and_rms_norm_of_llama() -> None:
    model = hf_zoo.build("llama")
    layer = model.layers[0]
    with torch.no_grad():
        layer.input_layernorm.weight.copy_(torch.linspace(-1, 2, WIDTH))
    value, out = layer.self_attn.v_proj.weight.detach(), layer.self_attn.o_proj.weight.detach()
    repeated = value.unflatten(0, (2, 8)).repeat_interleave(2, dim=0).flatten(0, 1)  # heads 1, 2 share, and 3, 4
    H = (out @ repeated * layer.input_layernorm.weight.detach()).numpy()
    found = ac.explain(model, progress=False)[1]
    assert_same_eigenvalues(found.eigenvalues, H, atol=1e-6)
    # The zeros of an H of lower rank are no eigenvalues to count.
    learnt = np.linalg.eigvals(H)[np.abs(np.linalg.eigvals(H)) > 1e-6]
    assert len(found.spectrum) == len(learnt) == 16
    assert found.negative_share == pytest.approx((learnt.real < 0).mean())


@pytest.mark.parametrize(("implementation", "side"), [("eager", "nowhere"), ("eager", "left"), ("sdpa", "right")])
def test_long_causal_attention_reads_the_same_under_any_mask(implementation: str, side: str) -> None:
    """Above 512 tokens. λ = −2.02: |1 + λ| = 1.02 beats |1 + λμ| for every μ from 0 to 0.99, not for one of −0.01."""
    options = {"num_hidden_layers": 1, "num_key_value_heads": 4, "max_position_embeddings": 600}
    model = hf_zoo.build("llama", **options, attn_implementation=implementation).float()
    with torch.no_grad():
        model.layers[0].input_layernorm.weight.fill_(1.0)
        model.layers[0].self_attn.v_proj.weight.copy_(torch.eye(WIDTH))
        model.layers[0].self_attn.o_proj.weight.copy_(-2.02 * torch.eye(WIDTH))
    ids = torch.randint(0, 40, (2, 540), generator=torch.Generator().manual_seed(0))
    kept = {"nowhere": slice(0, 540), "left": slice(20, 540), "right": slice(0, 520)}[side]
    mask = torch.ones_like(ids)
    mask[1] = 0
    mask[1, kept] = 1
    with pytest.warns(AcutanceWarning, match="λ = -2.02 lies beyond"):
        masked = ac.explain(model, [{"input_ids": ids, "attention_mask": mask}], progress=False)[1]
    model.set_attn_implementation("sdpa")
    with pytest.warns(AcutanceWarning, match="λ = -2.02 lies beyond"):
        alone = ac.explain(model, [{"input_ids": ids[:1]}, {"input_ids": ids[1:, kept]}], progress=False)[1]
    assert masked.family == alone.family == "constant"
    a, b = masked.dominance, alone.dominance
    assert a.predicted == b.predicted == Share(1.0, 0.0)
    assert a.mu_error == 0
    assert a.predicted_change == pytest.approx(b.predicted_change, abs=1e-5)
    assert a.branch.change == pytest.approx(b.branch.change, abs=1e-4)
    np.testing.assert_allclose(a.mu_min_by_sample, b.mu_min_by_sample, atol=1e-6)
    np.testing.assert_allclose(a.mu_largest_by_sample, b.mu_largest_by_sample, atol=1e-5)
    assert a.mu_min_by_sample.min() >= 0


def test_a_norm_before_or_behind_the_projection_is_told_of() -> None:
    found = ac.explain(hf_zoo.tiny("BitNetModel", **hf_zoo.DECODER), progress=False)
    assert "BitNetAttention before W_proj" in found.context["outside H"]
    assert "is not in the spectra" in str(found)
    assert ac.explain(hf_zoo.build("llama"), progress=False).context["outside H"] is None
    with pytest.warns(AcutanceWarning, match="normalises what its attention adds"):
        ac.explain(hf_zoo.build("gemma2"), progress=False)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "olmo2", "llama"])
def test_what_is_added_is_what_the_model_adds(name: str) -> None:
    model, records, seen = hf_zoo.build(name), [], {}
    site = ac.sites.find(model)[1]
    # What enters the block, and what is handed to the second half of it.
    names = {"olmo2": "mlp", "llama": "post_attention_layernorm"}
    half = getattr(site.block, names.get(name, "pre_feedforward_layernorm"))
    site.block.register_forward_pre_hook(lambda _, args, kwargs: seen.update(start=args[0]), with_kwargs=True)
    half.register_forward_pre_hook(lambda _, args: seen.update(middle=args[0]))
    with site.observe(records.append), torch.no_grad():
        model(torch.randint(3, 40, (2, 7)))
        assert (site.post_norm() is None) == (name == "llama")
        torch.testing.assert_close(site.update(records[0].branch), seen["middle"] - seen["start"], rtol=1e-5, atol=1e-6)


@pytest.fixture
def two_stacks() -> nn.Transformer:
    torch.manual_seed(0)
    return nn.Transformer(WIDTH, 2, 2, 2, 32, batch_first=True).eval()


def test_a_part_is_read_by_weights_and_by_data(two_stacks) -> None:
    with pytest.raises(AcutanceError, match=r"several stacks of layers .*part='encoder'"):
        ac.explain(two_stacks, progress=False)
    part = ac.explain(two_stacks, part="encoder", progress=False)
    attention = two_stacks.encoder.layers[1].self_attn
    H = attention.out_proj.weight.detach().double() @ attention.in_proj_weight[-WIDTH:].detach().double()
    assert_same_eigenvalues(part[2].eigenvalues, H.numpy())
    assert part.context["part"] == "encoder"


def test_a_sample_without_tokens_is_refused(two_stacks) -> None:
    padding = torch.tensor([[False], [True], [False]]).expand(3, 5)
    batch = {"src": torch.randn(3, 5, WIDTH), "src_key_padding_mask": padding}
    with pytest.raises(AcutanceError, match="sample 2 of a batch has no token that counts"):
        ac.explain(two_stacks.encoder, [batch], progress=False)
