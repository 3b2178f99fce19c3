"""What compiled code is told about functions of ours, and who looks on when an operation is called."""

import subprocess
import sys
from functools import partial

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from acutance.attention.kernels import packed
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
