"""The language models are what their rows say: each baseline its back-end, the kernel where it applies."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import SDPBackend

from acutance.attention.kernels import packed
from acutance.lab.bench import language
from acutance.lab.bench.language import WithBackend
from acutance.lab.bench.settings import Settings
from acutance.models import LanguageModel

CPU = Settings("cpu")
MODEL = {"vocabulary": 20, "dim": 16, "depth": 1, "heads": 1, "hidden": 16, "cutoffs": (), "dropout": 0.0}


def test_the_second_back_end_is_not_the_first_ones_compiled_code() -> None:
    """Two models of one class in one process: the trap is that the second is run by the code of the first."""
    seen: list[set[str]] = []

    def compiler(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> object:
        seen.append({str(node.target) for node in graph.graph.nodes})
        return make_boxed_func(graph.forward)

    words = torch.randint(20, (1, 4))
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        model = WithBackend(LanguageModel(**MODEL), backend)
        run = torch.compile(model, backend=aot_autograd(fw_compiler=compiler), dynamic=False, fullgraph=True)
        run(words, words).mean().backward()
    flash, math = (any("flash_attention" in name for name in names) for names in (set().union(*seen[:2]), seen[2]))
    assert flash
    assert not math
    assert len(seen) == 4  # forward and backward of each


@pytest.mark.parametrize("fused", [False, True])
def test_the_kernel_has_rows_where_it_applies(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "is_available", lambda qkv, heads: fused and qkv.shape == (1, 16, 3 * 64 * heads))
    found = [(c.variant, c.baseline) for c in language.candidates(language.TOY[0], CPU)]
    ours = [("plain, fused kernel", False), ("NeuTRENO, fused kernel", False)] if fused else [("NeuTRENO, SDPA", False)]
    assert found == [("plain, SDPA flash", True), ("plain, SDPA cuDNN", False), *ours]


def test_the_baselines_never_ask_for_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(packed, "is_available", lambda _qkv, _heads: bool(asked.append(True)))
    flash, _cudnn, neutreno = language.candidates(language.TOY[0], CPU)
    asked.clear()
    flash.make()()
    assert asked == []
    neutreno.make()()
    assert asked


def test_a_back_end_that_is_not_there_is_an_error() -> None:
    words = torch.randint(20, (1, 4))
    with pytest.raises(RuntimeError, match="No viable backend"):
        WithBackend(LanguageModel(**MODEL), SDPBackend.CUDNN_ATTENTION)(words, words)
