"""Models by the packed kernels against the same models by the operator: trained, compiled, checkpointed, exported."""

import pytest
import torch
from graph_recorder import recorder
from model_cases import (
    DEVICE,
    MITIGATIONS,
    RUNS,
    assert_equal_gradients,
    by_operator,
    causal_model,
    gradients,
    images,
    kernels_in,
    vit,
)

from acutance import mitigations
from acutance.attention import AttentionCall, Program
from acutance.attention.kernels import packed
from acutance.errors import AcutanceError
from acutance.models import LanguageModel

needs_kernels = pytest.mark.skipif(not RUNS, reason="needs a GPU or Triton's interpreter")


@pytest.fixture
def calls(monkeypatch):
    """How often the kernel was asked."""
    made = []
    original = packed._attend
    monkeypatch.setattr(packed, "_attend", lambda *a: made.append(1) or original(*a))
    return made


@needs_kernels
@pytest.mark.parametrize("mitigation", MITIGATIONS)
def test_a_vit_by_the_kernel_learns_as_by_the_operator(mitigation, monkeypatch, calls):
    model = vit(mitigation)
    expected = by_operator(model, monkeypatch, images())
    assert not calls
    assert_equal_gradients(gradients(model, model, images()), expected)
    assert len(calls) == 3


@needs_kernels
@pytest.mark.parametrize("mitigation", ["learnt", "together"])
def test_checkpointed_blocks_run_the_kernel_again(mitigation, monkeypatch, calls):
    model = vit(mitigation)
    expected = by_operator(model, monkeypatch, images())
    model.set_grad_checkpointing()
    assert_equal_gradients(gradients(model, model, images()), expected)
    assert len(calls) == 6


@needs_kernels
@pytest.mark.parametrize(
    ("mitigation", "checkpointed"),
    [("neutreno", False), ("learnt", True), ("together", False)],
)
def test_a_compiled_vit_is_one_graph_with_the_kernel_in_it(mitigation, checkpointed, monkeypatch):
    model = vit(mitigation)
    expected = by_operator(model, monkeypatch, images())
    model.set_grad_checkpointing(checkpointed)
    torch._dynamo.reset()
    graphs = []
    compiled = torch.compile(model, fullgraph=True, backend=recorder(graphs))
    assert_equal_gradients(gradients(compiled, model, images()), expected)
    assert len(graphs) == 1
    assert kernels_in(graphs[0]) == 3


@needs_kernels
@pytest.mark.parametrize("mitigation", ["neutreno", "together"])
def test_an_exported_vit_has_the_kernel_in_it(mitigation):
    model = vit(mitigation).eval()
    exported = torch.export.export(model, (images(),))
    assert kernels_in(exported.graph_module) == 3
    torch.testing.assert_close(exported.module()(images()), model(images()))


@needs_kernels
def test_a_causal_model_by_the_kernel_is_that_by_the_operator(monkeypatch, calls):
    model, words = causal_model(), torch.arange(20, device=DEVICE)[None] % 11
    found = model(words)
    assert len(calls) == 2
    monkeypatch.setattr(packed, "is_available", lambda *_: False)
    torch.testing.assert_close(found, model(words))


@needs_kernels
def test_the_kernel_does_not_hide_that_a_mean_would_look_ahead():
    options = dict(vocabulary=11, dim=32, depth=2, heads=2, hidden=32, cutoffs=())
    model = LanguageModel(mitigation="featscale", **options).to(DEVICE)
    with pytest.raises(AcutanceError, match="featscale averages over all tokens"):
        model(torch.arange(8, device=DEVICE)[None])


def program_of(mitigation, layer=2):
    shape = mitigations.LayerShape(layer=layer, dim=32, heads=2, head_dim=16, kv_heads=2)
    built = mitigations.as_mitigation(mitigation).for_layer(shape)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.copy_(torch.arange(1.0, 1 + parameter.numel()))
    v = torch.zeros(1, 2, 4, 16)
    return built.program(Program(), AttentionCall(layer=layer, v=v, first=None if layer == 1 else v))


@pytest.mark.parametrize(
    ("spec", "strength"),
    [("none", 0.0), ("neutreno:0.6", 0.6), ("neutreno:0.6+featscale", 0.6), ("neutreno:0.25+neutreno:0.5", 0.75)],
)
def test_what_the_kernel_can_add_is_given_to_it(spec, strength):
    assert program_of(spec) == Program(strength)


def test_a_gradient_that_stops_at_the_first_values_is_said_in_the_program():
    assert program_of("featscale+neutreno:0.6,detach=true") == Program(0.6, detach=True)


def test_first_values_with_and_without_their_gradient_are_no_one_program():
    assert program_of("neutreno:0.6,detach=true+neutreno:0.2") is None


def test_the_first_layer_has_no_correction():
    assert not program_of("neutreno:0.6,learn=head", layer=1).uses_first_values


def test_a_later_contrast_sharpens_an_earlier_correction():
    before, after = program_of("neutreno:0.5+attnscale"), program_of("attnscale+neutreno:0.5")
    assert before.gain.tolist() == after.gain.tolist() == [1.0, 2.0]  # ω
    assert before.strength.tolist() == [1.0, 1.5]
    assert after.strength == 0.5
    assert program_of("attnscale+attnscale").gain.tolist() == [3.0, 8.0]  # 1 + ω, multiplied


@pytest.mark.parametrize("base", [mitigations.NeuTRENO, mitigations.AttnScale, mitigations.FeatScale])
@pytest.mark.parametrize("hook", ["output", "values"])
def test_a_subclass_that_does_something_else_is_not_given_to_the_kernel(base, hook):
    other = type("Other", (base,), {hook: lambda self, *a: 2 * getattr(base, hook)(self, *a)})
    assert program_of(other()) is None


@pytest.mark.skipif(packed.INTERPRETED, reason="the interpreter takes CPU tensors")
@pytest.mark.parametrize(("shape", "dtype"), [((1, 65, 96), torch.float32), ((1, 65, 96), torch.float64)])
def test_elsewhere_the_operator_is_used(shape, dtype):
    assert not packed.is_available(torch.zeros(shape, dtype=dtype), 2)


class OnGPU:
    """As much of a tensor on a GPU as `is_available` looks at."""

    def __init__(self, tokens=65, packed=96, dtype=torch.bfloat16):
        self.shape, self.dtype, self.is_cuda, self.device = (2, tokens, packed), dtype, True, torch.device("cuda", 1)

    def stride(self, _):
        return 1


@pytest.fixture
def gpu(monkeypatch):
    """Pretend to a second GPU of some compute capability."""
    ask = torch.cuda.get_device_capability

    def pretend(*capability):
        monkeypatch.setattr(packed, "TRITON", True)
        monkeypatch.setattr(packed, "INTERPRETED", False)
        monkeypatch.setattr(packed, "ANY_GPU", False)
        # torch.compile asks about the GPU that is really there, and remembers what it hears.
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda index=None: capability if index == 1 else ask(index)
        )

    return pretend


@pytest.mark.parametrize(
    ("capability", "expected"), [((9, 0), True), ((8, 0), False), ((8, 9), False), ((10, 0), False)]
)
def test_the_kernel_is_asked_on_gpus_it_was_tried_on(gpu, capability, expected, monkeypatch):
    gpu(*capability)
    assert packed.is_available(OnGPU(), 2) is expected
    monkeypatch.setattr(packed, "ANY_GPU", True)
    assert packed.is_available(OnGPU(), 2)


def test_which_gpu_it_is_can_be_asked_in_a_compiled_graph(gpu):
    gpu(9, 0)
    torch._dynamo.reset()
    chosen = torch.compile(lambda x: x + 1 if packed._is_known(x.ndim) else x - 1, fullgraph=True, backend="eager")
    assert chosen(torch.zeros(1)) == 1


@pytest.mark.parametrize(
    ("given", "heads"),
    [
        ({"tokens": 257, "packed": 6 * 128}, (2,)),
        ({"packed": 97}, (2,)),
        ({"packed": 48}, (2,)),
        ({"dtype": torch.float64}, (2,)),
        ({"packed": 128}, (4, 3)),
    ],
)
def test_odd_shapes_are_for_the_operator(gpu, given, heads, monkeypatch):
    gpu(9, 0)
    assert not packed.is_available(OnGPU(**given), *heads)


def test_long_sequences_are_taken_at_their_widths(gpu):
    gpu(9, 0)
    for width in (16, 32, 64):
        assert packed.is_available(OnGPU(tokens=2048, packed=6 * width), 2)
    assert not packed.is_available(OnGPU(tokens=2048, packed=6 * 128), 2)
    assert packed.is_available(OnGPU(tokens=256, packed=6 * 128), 2)
    assert not packed.is_available(OnGPU(tokens=2048, packed=6 * 64, dtype=torch.float32), 2)
    assert not packed.is_available(OnGPU(tokens=0), 2)
    assert packed.is_available(OnGPU(packed=128), 4, 2)


def test_wide_heads_in_float32_are_for_the_operator(gpu):
    gpu(9, 0)
    assert packed.is_available(OnGPU(packed=6 * 32, dtype=torch.float32), 2)
    assert not packed.is_available(OnGPU(packed=6 * 64, dtype=torch.float32), 2)
