"""Launching again: the compiled code gets the arguments, then the constants, and none of Triton's options."""

import pytest
import torch

from acutance.attention.kernels import packed

if not packed.TRITON:
    pytest.skip("needs Triton", allow_module_level=True)

from acutance.attention.kernels import launching


class Kernel:
    """What a launch is asked for, and what of it is compiled."""

    arg_names = ("x", "count", "WIDTH", "CAUSAL")

    def __init__(self, compiles=True):
        self.compiles, self.asked, self.ran = compiles, [], []

    def __getitem__(self, grid):
        def launch(*args, **constants):
            self.asked.append((grid, args, constants))
            return Compiled(self) if self.compiles else None

        return launch


class Compiled:
    function, packed_metadata = "code", "metadata"

    def __init__(self, kernel):
        self.kernel = kernel

    def run(self, *args):
        self.kernel.ran.append(args)


CONSTANTS = {"CAUSAL": True, "WIDTH": 64, "num_warps": 4}  # in any order


def test_the_second_launch_is_direct(monkeypatch):
    kernel = Kernel()
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: ("stream of", device), raising=False)
    launch = launching.Launch(kernel, (3,), CONSTANTS)
    x, y = torch.zeros(2)
    launch([x], 1)
    launch([y], 2)
    assert kernel.asked == [((3, 1, 1), (x, 1), CONSTANTS)]
    grid, stream, code, no_hooks = (3, 1, 1), ("stream of", -1), ("code", "metadata"), (None, None, None)
    assert kernel.ran == [(*grid, stream, *code, *no_hooks, y.data_ptr(), 2, 64, True)]


def test_every_launch_is_tritons_where_nothing_is_compiled():
    kernel = Kernel(compiles=False)
    launch = launching.Launch(kernel, (3, 2), CONSTANTS)
    launch(["x"], 1)
    launch(["y"], 2)
    assert [(grid, args) for grid, args, _ in kernel.asked] == [((3, 2, 1), ("x", 1)), ((3, 2, 1), ("y", 2))]
    assert kernel.ran == []


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
