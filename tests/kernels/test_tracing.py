"""What compiled code is told about functions of ours, who looks on when an operation is called, and launching again."""

import subprocess
import sys
from functools import partial
from unittest.mock import MagicMock, Mock, call

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from acutance.attention.kernels import launching, packed
from acutance.attention.kernels.tracing import constant_in_traces, is_watched


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
    program = "import sys, acutance.cli; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


class Onlooker(TorchDispatchMode):
    """Sees every operation."""

    seen = ()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += (str(func),)
        return func(*args, **(kwargs or {}))


class Called(torch.nn.Module):
    def __init__(self, look):
        super().__init__()
        self.forward = look


def under(mode, look):
    with mode:
        look(torch.ones(2))


WATCHED = {
    "a compiler": lambda look: torch.compile(look, backend="eager")(torch.ones(2)),
    "an export": lambda look: torch.export.export(Called(look), (torch.ones(2),), strict=False),
    "a mode": partial(under, Onlooker()),
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
    with Onlooker() as onlooker, torch.no_grad():
        watched = packed.attention(qkv, 2, 0.25)
    assert "acutance.packed_attention.default" in onlooker.seen
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
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_tensor_elsewhere_is_refused_after_others_were_launched():
    from acutance.metrics.kernels.token_sums import token_sums

    tokens, mask = torch.zeros(2, 8, 16, device="cuda"), torch.ones(2, 8, dtype=torch.bool)
    for _ in range(2):
        token_sums(tokens, mask.cuda())
    with pytest.raises(ValueError, match="cpu tensor"):
        token_sums(tokens, mask)
    torch.cuda.synchronize()
