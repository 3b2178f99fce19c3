"""Blocks that something was wrapped around before the model is mitigated: the block is what is inside."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from transformers import LlamaConfig, LlamaModel

import acutance as ac
from acutance.sites.structure import unwrapped

WRAPPER = "_checkpoint_wrapped_module."


def llama():
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaModel(LlamaConfig(hidden_size=16, num_hidden_layers=3, intermediate_size=24, vocab_size=20, **heads))
    ids = torch.arange(10).reshape(2, 5)
    return model, model.layers, lambda: model(ids, use_cache=False).last_hidden_state


def torch_encoder():
    layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, norm_first=True, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    x = torch.linspace(-1, 1, 160).reshape(2, 5, 16).sin().double()
    return model, model.layers, lambda: model(x)


def gradients(make, wrapped_layers):
    """Of a mitigated model, some of whose blocks were wrapped first, by the parameters' plain names."""
    torch.manual_seed(0)
    model, blocks, run = make()
    model.double().train()
    for layer in wrapped_layers:
        blocks[layer - 1] = checkpoint_wrapper(blocks[layer - 1], CheckpointImpl.NO_REENTRANT)
    ac.mitigate(model, "neutreno:0.6")
    assert [site.layer for site in ac.sites.find(model)] == [1, 2, 3]
    run().square().mean().backward()
    return {name.replace(WRAPPER, ""): parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("make", [llama, torch_encoder])
@pytest.mark.parametrize("layers", [(1, 2, 3), (1,), (2, 3)])
def test_checkpoints_around_blocks_may_be_there_before_the_mitigation(make, layers):
    torch.testing.assert_close(gradients(make, layers), gradients(make, ()), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("make", [llama, torch_encoder])
def test_sites_name_the_block_inside(make):
    model, blocks, _ = make()
    inside = list(blocks)
    for index, block in enumerate(inside):
        blocks[index] = checkpoint_wrapper(checkpoint_wrapper(block))
    assert [site.block for site in ac.sites.find(model)] == inside == [unwrapped(block) for block in blocks]
