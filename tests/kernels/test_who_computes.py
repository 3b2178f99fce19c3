"""What the kernels are asked for and what is left to PyTorch; seen without a GPU or Triton."""

import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock, call

import pytest
import torch
from torch._subclasses import FakeTensorMode

from acutance import mitigations
from acutance.attention import AttentionCall, Program
from acutance.attention.kernels import launching, packed
from acutance.attention.kernels.tracing import constant_in_traces, is_watched
from acutance.errors import AcutanceWarning, ShapeError
from acutance.metrics.kernels import token_sums
from acutance.models.block import Mlp
from acutance.models.kernels import mlp
from attention.operator_cases import LargestTensor
from sites.tiny_models import Made


def program_of(mitigation, layer=2):
    shape = mitigations.LayerShape(layer=layer, dim=32, heads=2, head_dim=16, kv_heads=2)
    built = mitigations.as_mitigation(mitigation).for_layer(shape)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.copy_(torch.arange(1.0, 1 + parameter.numel()))
    v = torch.zeros(1, 2, 4, 16)
    return built.program(Program(), AttentionCall(layer=layer, v=v, first=None if layer == 1 else v))


def test_what_the_kernel_can_add_is_given_to_it_and_a_later_contrast_sharpens_an_earlier_correction():
    assert program_of("none") == Program()
    assert program_of("neutreno:0.6") == program_of("neutreno:0.6+featscale") == Program(0.6)
    assert program_of("neutreno:0.25+neutreno:0.5") == Program(0.75)
    assert program_of("featscale+neutreno:0.6,detach=true") == Program(0.6, detach=True)
    assert program_of("neutreno:0.6,detach=true+neutreno:0.2") is None  # v⁰ with and without its gradient
    assert not program_of("neutreno:0.6,learn=head", layer=1).uses_first_values
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
def test_on_a_cpu_pytorch_computes():
    assert not packed.is_available(torch.zeros(1, 65, 96), 2)
    assert not token_sums.is_available(torch.zeros(2, 3, 4), None)
    layers = Mlp(64, 128, 0.0).to(torch.bfloat16)
    assert not mlp.is_available(torch.zeros(2, 64, dtype=torch.bfloat16), layers.fc1, layers.fc2)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 3), (4, 0), (5, None)])
def test_heads_that_do_not_fit_are_named(heads, kv_heads):
    with pytest.raises(ShapeError, match=rf"\(1, 17, 96\) does not hold {heads} heads"):
        packed.attention(torch.zeros(1, 17, 96), heads, 1.0, kv_heads=kv_heads)


def on_gpu(tokens=65, packed=96, dtype=torch.bfloat16):
    """As much of a tensor on a GPU as `is_available` looks at."""
    where = {"dtype": dtype, "is_cuda": True, "device": torch.device("cuda", 1)}
    return SimpleNamespace(shape=(2, tokens, packed), stride=lambda _: 1, **where)


@pytest.fixture
def gpu(monkeypatch):
    """Pretend to a second GPU, of compute capability 9.0 unless it is changed."""
    ask, capability = torch.cuda.get_device_capability, [9, 0]
    for name, value in {"TRITON": True, "INTERPRETED": False, "ANY_GPU": False}.items():
        monkeypatch.setattr(packed, name, value)
    # torch.compile asks about the GPU that is really there, and remembers what it hears.
    told = {1: lambda: tuple(capability)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: told.get(index, lambda: ask(index))())
    return capability


@pytest.mark.parametrize("capability", [(9, 0), (8, 0), (8, 9), (10, 0)])
def test_the_kernel_is_asked_on_gpus_it_was_tried_on(gpu, capability, monkeypatch):
    gpu[:] = capability
    assert packed.is_available(on_gpu(), 2) is (capability == (9, 0))
    monkeypatch.setattr(packed, "ANY_GPU", True)
    assert packed.is_available(on_gpu(), 2)


@pytest.mark.usefixtures("gpu")
def test_which_gpu_it_is_can_be_asked_in_a_compiled_graph():
    torch._dynamo.reset()
    chosen = torch.compile(lambda x: x + 1 if packed._is_known(x.ndim) else x - 1, fullgraph=True, backend="eager")
    assert chosen(torch.zeros(1)) == 1


TAKEN = [({"packed": 128}, (4, 2)), ({"tokens": 256, "packed": 6 * 128}, (2,))]
TAKEN += [({"tokens": 2048, "packed": 6 * width}, (2,)) for width in (16, 32, 64)]
OTHERS = [({"packed": 128}, (4, 3)), *(({"tokens": count, "packed": 6 * 128}, (2,)) for count in (257, 2048))]
OTHERS += [(given, (2,)) for given in ({"packed": 97}, {"dtype": torch.float64}, {"tokens": 0})]
OTHERS += [({"tokens": count, "packed": 6 * 64, "dtype": torch.float32}, (2,)) for count in (65, 2048)]


@pytest.mark.parametrize(
    ("given", "heads", "expected"), [*((*one, True) for one in TAKEN), *((*one, False) for one in OTHERS)]
)
@pytest.mark.usefixtures("gpu")
def test_odd_shapes_are_for_the_operator(given, heads, expected):
    assert packed.is_available(on_gpu(**given), *heads) is expected


def test_kernels_that_do_not_compile_or_are_wrong_are_done_without(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU of dreams")
    known, right = token_sums._is_known.__wrapped__, token_sums.plain_sums  # not as remembered
    with monkeypatch.context() as patch:
        patch.setattr(token_sums, "_agrees", Mock(side_effect=RuntimeError("Failed to find C compiler")))
        with pytest.warns(AcutanceWarning, match=r"GPU of dreams \(RuntimeError: Failed to find C compiler\)"):
            assert not known(torch.device("cpu"))
    monkeypatch.setattr(token_sums, "token_sums", right)
    assert known(torch.device("cpu"))
    monkeypatch.setattr(token_sums, "token_sums", lambda tokens, mask: right(tokens, mask) * (1 + 1e-6))
    with pytest.warns(AcutanceWarning, match="its sums are wrong"):
        assert not known(torch.device("cpu"))


def test_a_compiled_function_does_not_look_inside():
    calls = []

    @constant_in_traces
    def answer():
        calls.append(3)
        return 3

    run = torch.compile(lambda x: x * answer(), backend="eager", fullgraph=True)
    assert run(torch.ones(2)).tolist() == run(torch.ones(2)).tolist() == [3, 3]
    assert calls == [3], "once, when it was traced"


def test_the_package_starts_without_the_compiler():
    program = "import sys, acutance.__main__; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def under(mode, look):
    with mode:
        look(torch.ones(2))


WATCHED = {
    "a compiler": lambda look: torch.compile(look, backend="eager")(torch.ones(2)),
    "an export": lambda look: torch.export.export(Made(lambda _, x: look(x)), (torch.ones(2),), strict=False),
    "a mode": partial(under, LargestTensor()),
    "a fake": partial(under, FakeTensorMode()),
    "vmap": lambda look: torch.vmap(look)(torch.ones(2, 3)),
    "grad": lambda look: torch.func.grad(lambda x: look(x).sum())(torch.ones(2)),
    "make_fx": lambda look: torch.fx.experimental.proxy_tensor.make_fx(look)(torch.ones(2)),
    "a trace": lambda look: torch.jit.trace(look, torch.ones(2), check_trace=False),
    "a subclass": lambda look: look(torch.nn.Parameter(torch.ones(2))),
    "nobody": lambda look: look(torch.ones(2)),
}


@pytest.mark.parametrize("who", WATCHED)
def test_who_looks_on_is_noticed(who):
    said = []

    def look(x):
        said.append(is_watched(x))
        return x + 1

    WATCHED[who](look)
    assert set(said) == {who != "nobody"}


@pytest.mark.skipif(not (packed.INTERPRETED and packed.TRITON), reason="needs Triton's interpreter")
def test_attention_that_nobody_watches_is_the_operation_without_its_detour(monkeypatch):
    qkv = torch.randn(2, 5, 3 * 32, generator=torch.Generator().manual_seed(0))
    with LargestTensor() as onlooker, torch.no_grad():
        watched = packed.attention(qkv, 2, 0.25)
    assert "acutance.packed_attention.default" in map(str, onlooker.operations)
    learning = packed.attention(qkv.requires_grad_(), 2, 0.25)
    monkeypatch.setattr(packed, "packed_attention", lambda *_: pytest.fail("the detour"))
    with torch.no_grad():
        assert torch.equal(packed.attention(qkv, 2, 0.25), watched)
    assert torch.equal(learning, watched)


CONSTANTS = {"CAUSAL": True, "WIDTH": 64, "num_warps": 4}  # in any order


@pytest.mark.parametrize("compiles", [True, False])
def test_the_second_launch_is_direct_where_something_is_compiled(compiles, monkeypatch):
    """The compiled code gets the arguments, then the constants, and none of Triton's options."""
    kernel, compiled = (
        MagicMock(arg_names=("x", "count", "WIDTH", "CAUSAL")),
        Mock(function="code", packed_metadata="of"),
    )
    kernel.__getitem__.return_value.return_value = compiled if compiles else None
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: ("stream of", device), raising=False)
    launch, (x, y) = launching.Launch(kernel, (3,), CONSTANTS), torch.arange(2.0)
    launch([x], 1)
    launch([y], 2)
    grid, asked = (3, 1, 1), [call(x, 1, **CONSTANTS), call(y, 2, **CONSTANTS)]
    assert kernel.__getitem__.call_args_list == [call(grid)] * (1 if compiles else 2)
    assert kernel.__getitem__.return_value.call_args_list == asked[: 1 if compiles else 2]
    direct = call(*grid, ("stream of", -1), "code", "of", None, None, None, y.data_ptr(), 2, 64, True)
    assert compiled.run.call_args_list == [direct] * compiles


def test_placement_is_that_of_the_first_number():
    numbers = torch.zeros(64)
    assert launching.placement(numbers, numbers[4:], numbers[1:]) == ((-1, True), (-1, True), (-1, False))
    assert launching.is_current(torch.device("cpu"))


@pytest.mark.cuda
def test_a_tensor_elsewhere_is_refused_after_others_were_launched():
    from acutance.metrics.kernels.token_sums import token_sums

    tokens, mask = torch.zeros(2, 8, 16, device="cuda"), torch.ones(2, 8, dtype=torch.bool)
    for _ in range(2):
        token_sums(tokens, mask.cuda())
    with pytest.raises(ValueError, match="cpu tensor"):
        token_sums(tokens, mask)
    torch.cuda.synchronize()
