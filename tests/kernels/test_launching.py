"""Launching again: the compiled code gets the arguments, then the constants, and none of Triton's options."""

from unittest.mock import MagicMock, Mock, call

import pytest
import torch

from acutance.attention.kernels import launching

CONSTANTS = {"CAUSAL": True, "WIDTH": 64, "num_warps": 4}  # in any order


@pytest.mark.parametrize("compiles", [True, False])
def test_the_second_launch_is_direct_where_something_is_compiled(compiles, monkeypatch):
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
