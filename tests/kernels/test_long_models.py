"""Models with more tokens than the kernels for short sequences take, by the kernels and by the operator."""

import pytest
import torch
from graph_recorder import recorder
from model_cases import (
    CUDA,
    DEVICE,
    RUNS,
    assert_equal_gradients,
    by_operator,
    causal_model,
    gradients,
    images,
    kernels_in,
    vit,
)

from acutance.attention.kernels import packed, packed_operation

if not RUNS:
    pytest.skip("needs a GPU or Triton's interpreter", allow_module_level=True)

IMAGE_SIZE = 64  # 257 tokens
SMALLER, FEWER = 36, 82  # pixels and tokens: still more than one tile of 64 or 32, and the last not full


@pytest.fixture(autouse=True)
def _narrow_heads(monkeypatch):
    """Let models ask for heads 16 wide in float32, which the interpreter can take and rounding does not blur."""
    monkeypatch.setattr(packed, "LONG_WIDTHS", {4: (16,)})


@pytest.fixture
def _long_soon(monkeypatch):
    """Let the kernels for long sequences begin at 65 tokens: the interpreter is slow."""
    for room in (packed, packed_operation):
        monkeypatch.setattr(room, "MOST_TOKENS", 64)


@pytest.fixture
def tokens(monkeypatch):
    """How many tokens the kernels were asked for, at each call."""
    asked = []
    original = packed._attend
    monkeypatch.setattr(packed, "_attend", lambda qkv, *a: asked.append(qkv.shape[1]) or original(qkv, *a))
    return asked


def model_and_images(mitigation, size=SMALLER):
    return vit(mitigation, size, depth=2), images(size, count=1)


@pytest.mark.parametrize("mitigation", ["neutreno", "together"])
def test_a_vit_by_the_kernel_learns_as_by_the_operator(mitigation, monkeypatch, tokens):
    model, given = model_and_images(mitigation, IMAGE_SIZE)
    expected = by_operator(model, monkeypatch, given)
    assert not tokens
    assert_equal_gradients(gradients(model, model, given), expected)
    assert tokens == [257, 257]


@pytest.mark.usefixtures("_long_soon")
def test_checkpointed_blocks_run_the_kernel_again(monkeypatch, tokens):
    model, given = model_and_images("together")
    expected = by_operator(model, monkeypatch, given)
    model.set_grad_checkpointing()
    assert_equal_gradients(gradients(model, model, given), expected)
    assert tokens == [FEWER] * 4


@pytest.mark.usefixtures("_long_soon")
def test_a_compiled_vit_is_one_graph_with_the_kernel_in_it(monkeypatch):
    model, given = model_and_images("together")
    expected = by_operator(model, monkeypatch, given)
    torch._dynamo.reset()
    graphs = []
    compiled = torch.compile(model, fullgraph=True, backend=recorder(graphs))
    assert_equal_gradients(gradients(compiled, model, given), expected)
    assert [kernels_in(graph) for graph in graphs] == [2]


@pytest.mark.usefixtures("_long_soon")
def test_an_exported_vit_has_the_kernel_in_it():
    model, given = model_and_images("together")
    exported = torch.export.export(model.eval(), (given,))
    assert kernels_in(exported.graph_module) == 2
    torch.testing.assert_close(exported.module()(given), model(given))


def test_a_causal_model_by_the_kernel_is_that_by_the_operator(monkeypatch, tokens):
    model, words = causal_model(), torch.arange(270, device=DEVICE)[None] % 11
    found = model(words)
    assert tokens == [270, 270]
    monkeypatch.setattr(packed, "is_available", lambda *_: False)
    torch.testing.assert_close(found, model(words))


@pytest.mark.cuda
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("count", [65, 300])
def test_kernels_run_where_their_tensors_are(count):
    qkv = torch.randn(1, count, 3 * 64, dtype=torch.bfloat16)
    on_first, on_second = (
        packed_operation.packed_attention(qkv.to(device), None, None, None, None, 0.0, 1, 1, 0.3, False)[0]
        for device in ("cuda:0", "cuda:1")
    )
    assert torch.equal(on_first.cpu(), on_second.cpu())
