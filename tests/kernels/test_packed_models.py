"""Models by the packed kernels against the same models by the operator: trained, compiled, checkpointed, exported."""

import pytest
import torch
from model_cases import (
    MITIGATIONS,
    assert_equal_gradients,
    by_operator,
    causal_model,
    gradients,
    images,
    kernels_in,
    recorder,
    vit,
)
from packed_cases import CUDA, DEVICE, needs_kernels

from acutance import mitigations
from acutance.attention import AttentionCall, Program
from acutance.attention.kernels import packed, packed_operation
from acutance.errors import AcutanceError
from acutance.models import LanguageModel

SHORT, LONG = 16, 36  # pixels: 17 tokens, and 82, still more than one tile of 64 or 32, the last not full
LENGTHS = pytest.mark.parametrize("size", [SHORT, LONG], ids=["short", "long"])


@pytest.fixture
def _long_soon(monkeypatch):
    """Kernels for long sequences begin at 65 tokens, and take heads 16 wide in float32: the interpreter is slow."""
    monkeypatch.setattr(packed, "LONG_WIDTHS", {4: (16,)})
    for room in (packed, packed_operation):
        monkeypatch.setattr(room, "MOST_TOKENS", 64)


@pytest.fixture
def asked(monkeypatch, _long_soon):
    """How many tokens the kernels were asked for, at each call."""
    tokens, original = [], packed._attend
    monkeypatch.setattr(packed, "_attend", lambda qkv, *a: tokens.append(qkv.shape[1]) or original(qkv, *a))
    return tokens


def model_and_images(mitigation, size):
    return vit(mitigation, size, depth=2), images(size, count=1)


@needs_kernels
@pytest.mark.parametrize(("mitigation", "size"), [*((name, SHORT) for name in MITIGATIONS), ("neutreno", LONG)])
def test_a_vit_by_the_kernel_learns_as_by_the_operator(mitigation, size, monkeypatch, asked):
    model, given = model_and_images(mitigation, size)
    expected = by_operator(model, monkeypatch, given)
    assert not asked
    assert_equal_gradients(gradients(model, model, given), expected)
    assert asked == [17 if size == SHORT else 82] * 2


@needs_kernels
@LENGTHS
def test_checkpointed_blocks_run_the_kernel_again(size, monkeypatch, asked):
    model, given = model_and_images("together", size)
    expected = by_operator(model, monkeypatch, given)
    model.set_grad_checkpointing()
    assert_equal_gradients(gradients(model, model, given), expected)
    assert len(asked) == 4


@needs_kernels
@pytest.mark.parametrize(
    ("mitigation", "size", "checkpointed"),
    [("neutreno", SHORT, False), ("learnt", SHORT, True), ("together", SHORT, False), ("together", LONG, False)],
)
@pytest.mark.usefixtures("_long_soon")
def test_a_compiled_vit_is_one_graph_with_the_kernel_in_it(mitigation, size, checkpointed, monkeypatch):
    model, given = model_and_images(mitigation, size)
    expected = by_operator(model, monkeypatch, given)
    model.set_grad_checkpointing(checkpointed)
    torch._dynamo.reset()
    graphs = []
    compiled = torch.compile(model, fullgraph=True, backend=recorder(graphs))
    assert_equal_gradients(gradients(compiled, model, given), expected)
    assert [kernels_in(graph) for graph in graphs] == [2]


@needs_kernels
@LENGTHS
@pytest.mark.usefixtures("_long_soon")
def test_an_exported_vit_has_the_kernel_in_it(size):
    model, given = model_and_images("together", size)
    exported = torch.export.export(model.eval(), (given,))
    assert kernels_in(exported.graph_module) == 2
    torch.testing.assert_close(exported.module()(given), model(given))


@needs_kernels
@pytest.mark.parametrize("count", [20, 82])
def test_a_causal_model_by_the_kernel_is_that_by_the_operator(count, monkeypatch, asked):
    model, words = causal_model(), torch.arange(count, device=DEVICE)[None] % 11
    found = model(words)
    assert asked == [count, count]
    monkeypatch.setattr(packed, "is_available", lambda *_: False)
    torch.testing.assert_close(found, model(words))


@pytest.mark.cuda
@pytest.mark.skipif(not CUDA or torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("count", [65, 300])
def test_kernels_run_where_their_tensors_are(count):
    qkv = torch.randn(1, count, 3 * 64, dtype=torch.bfloat16)
    on_first, on_second = (
        packed_operation.packed_attention(qkv.to(device), None, None, None, None, 0.0, 1, 1, 0.3, False)[0]
        for device in ("cuda:0", "cuda:1")
    )
    assert torch.equal(on_first.cpu(), on_second.cpu())


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
    ("spec", "expected"),
    [
        ("none", Program()),
        ("neutreno:0.6", Program(0.6)),
        ("neutreno:0.6+featscale", Program(0.6)),
        ("neutreno:0.25+neutreno:0.5", Program(0.75)),
        ("featscale+neutreno:0.6,detach=true", Program(0.6, detach=True)),
        ("neutreno:0.6,detach=true+neutreno:0.2", None),  # v⁰ with and without its gradient
    ],
)
def test_what_the_kernel_can_add_is_given_to_it(spec, expected):
    assert program_of(spec) == expected
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
def test_elsewhere_the_operator_is_used():
    assert not packed.is_available(torch.zeros(1, 65, 96), 2)


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
    ("given", "heads", "expected"),
    [
        ({"tokens": 257, "packed": 6 * 128}, (2,), False),
        ({"packed": 97}, (2,), False),
        ({"dtype": torch.float64}, (2,), False),
        ({"packed": 128}, (4, 3), False),
        ({"packed": 128}, (4, 2), True),
        ({"tokens": 0}, (2,), False),
        *(({"tokens": 2048, "packed": 6 * width}, (2,), width < 128) for width in (16, 32, 64, 128)),
        ({"tokens": 256, "packed": 6 * 128}, (2,), True),
        ({"tokens": 2048, "packed": 6 * 64, "dtype": torch.float32}, (2,), False),
        ({"packed": 6 * 64, "dtype": torch.float32}, (2,), False),
    ],
)
def test_odd_shapes_are_for_the_operator(gpu, given, heads, expected):
    gpu(9, 0)
    assert packed.is_available(OnGPU(**given), *heads) is expected
