"""Models by the packed kernels against the same models by the operator: trained, compiled, checkpointed, exported."""

import kernel_cases
import pytest
import torch
from kernel_cases import CUDA, DEVICE, MITIGATIONS, assert_equal_gradients, by_operator, gradients

from acutance.attention.kernels import packed, packed_operation
from acutance.errors import AcutanceError

pytestmark = kernel_cases.needs_kernels
SHORT, LONG = 16, 36  # pixels: 17 tokens, and 82, still more than one tile of 64 or 32, the last not full
size = kernel_cases.each([SHORT, LONG])


@pytest.fixture(autouse=True)
def _long_soon(monkeypatch):
    """Kernels for long sequences begin at 65 tokens, and take heads 16 wide in float32: the interpreter is slow."""
    monkeypatch.setattr(packed, "LONG_WIDTHS", {4: (16,)})
    for room in (packed, packed_operation):
        monkeypatch.setattr(room, "MOST_TOKENS", 64)


@pytest.fixture
def asked(monkeypatch):
    """How many tokens the kernels were asked for, at each call."""
    tokens, original = [], packed._attend
    monkeypatch.setattr(packed, "_attend", lambda qkv, *a: tokens.append(qkv.shape[1]) or original(qkv, *a))
    return tokens


def model_and_images(mitigation, size):
    return kernel_cases.vit(mitigation, size, depth=2), kernel_cases.images(size, count=1)


LEARNT = [*((name, SHORT, False) for name in MITIGATIONS), ("neutreno", LONG, False)]
CHECKPOINTED = [("together", SHORT, True), ("together", LONG, True)]  # blocks run the kernel again
COMPILED = [("neutreno", SHORT, False), ("learnt", SHORT, True), ("together", SHORT, False), ("together", LONG, False)]


@pytest.mark.parametrize(("mitigation", "size", "checkpointed"), LEARNT + CHECKPOINTED)
def test_a_vit_by_the_kernel_learns_as_by_the_operator(mitigation, size, checkpointed, monkeypatch, asked):
    model, given = model_and_images(mitigation, size)
    expected = by_operator(model, monkeypatch, given)
    assert not asked
    model.set_grad_checkpointing(checkpointed)
    assert_equal_gradients(gradients(model, model, given), expected)
    assert asked == [17 if size == SHORT else 82] * (4 if checkpointed else 2)


MODELS = {"some layers": {"layers": (2, 4)}, "drop path": {"drop_path": 0.5}, "first layer frozen": {}, "exported": {}}


@pytest.mark.parametrize("case", MODELS)
def test_a_vit_gathers_as_by_the_operator(case, monkeypatch):
    model, dtype = kernel_cases.vit("by head", depth=4, **MODELS[case]), torch.float64
    if case == "drop path":
        dtype = torch.float32
    if case == "first layer frozen":  # is owed nothing
        for part in (model.patch_embed, model.blocks[0], model.pos_embed, model.cls_token):
            part.requires_grad_(False)
    run = torch.export.export(model, (kernel_cases.images(),)).module() if case == "exported" else model
    given = kernel_cases.images()
    assert_equal_gradients(gradients(run, run, given), by_operator(model, monkeypatch, given, dtype))


@pytest.mark.parametrize(("mitigation", "size", "checkpointed"), COMPILED)
def test_a_compiled_vit_is_one_graph_with_the_kernel_in_it(mitigation, size, checkpointed, monkeypatch):
    model, given = model_and_images(mitigation, size)
    expected = by_operator(model, monkeypatch, given)
    model.set_grad_checkpointing(checkpointed)
    torch._dynamo.reset()
    graphs = []
    compiled = torch.compile(model, fullgraph=True, backend=kernel_cases.recorder(graphs))
    assert_equal_gradients(gradients(compiled, model, given), expected)
    assert [kernel_cases.kernels_in(graph) for graph in graphs] == [2]


def test_an_exported_vit_has_the_kernel_in_it(size):
    model, given = model_and_images("together", size)
    exported = torch.export.export(model.eval(), (given,))
    assert kernel_cases.kernels_in(exported.graph_module) == 2
    torch.testing.assert_close(exported.module()(given), model(given))


@pytest.mark.parametrize("count", [20, 82])
def test_a_causal_model_by_the_kernel_is_that_by_the_operator(count, monkeypatch, asked):
    model, words = kernel_cases.causal_model("neutreno:0.6+attnscale"), torch.arange(count, device=DEVICE)[None] % 11
    found = model(words)
    assert asked == [count, count]
    monkeypatch.setattr(packed, "is_available", lambda *_: False)
    torch.testing.assert_close(found, model(words))


@pytest.mark.cuda
@pytest.mark.skipif(not CUDA or torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("count", [17, 300])
def test_kernels_run_where_their_tensors_are(count):
    qkv = kernel_cases.random(1, count, 3 * 64, dtype=torch.bfloat16)
    numbers = (None, None, None, None, 0.0, 1, 1, 0.3, False)
    first, second = (packed_operation.packed_attention(qkv.to(f"cuda:{n}"), *numbers)[0] for n in (0, 1))
    assert torch.equal(first.cpu(), second.cpu())


def test_the_kernel_does_not_hide_that_a_mean_would_look_ahead():
    with pytest.raises(AcutanceError, match="featscale averages over all tokens"):
        kernel_cases.causal_model("featscale")(torch.arange(8, device=DEVICE)[None])
