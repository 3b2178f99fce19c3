"""Launching a Triton kernel many times for arguments of one kind.

Triton inspects every argument of every launch to find the compiled code. For a kernel that reads a few tokens this
takes the CPU longer than the kernel takes the GPU, although the arguments are of the same kind in every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ALIGNED = 16  # bytes: Triton compiles separate code for pointers and strides that are multiples of it


class Launch:
    """A kernel, its grid and its constants. After the first launch the compiled code is called directly.

    The caller makes sure that all arguments are like those of the first launch: the same dtypes, strides and
    `placement`. Compiled code checks nothing and takes any address, even that of a CPU tensor. Numbers that Triton does
    not specialise on may differ.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], constants: dict[str, Any]) -> None:
        self.kernel, self.constants = kernel, constants
        self.grid = (*grid, 1, 1)[:3]
        self._run: Any = None
        self._code: tuple[Any, ...] = ()
        self._values: tuple[Any, ...] = ()

    def __call__(self, tensors: Sequence[Tensor], *numbers: float) -> None:
        """Launch in the current stream of the current device, where the tensors are. They are the first arguments."""
        if self._run is not None:
            stream = torch._C._cuda_getCurrentRawStream(tensors[0].get_device())
            # Given a tensor, Triton would ask the driver where it is.
            pointers = [x.data_ptr() for x in tensors]
            self._run(*self.grid, stream, *self._code, *pointers, *numbers, *self._values)
            return
        compiled = self.kernel[self.grid](*tensors, *numbers, **self.constants)
        if compiled is not None:  # the interpreter compiles nothing
            self._values = tuple(self.constants[name] for name in self.kernel.arg_names[len(tensors) + len(numbers) :])
            self._code = (compiled.function, compiled.packed_metadata, None, None, None)  # no profiler's hooks
            self._run = compiled.run


def placement(*tensors: Tensor) -> tuple[tuple[int, bool], ...]:
    """The device number of each tensor, and whether its memory begins at a multiple of `ALIGNED`."""
    return tuple([(x.get_device(), x.data_ptr() % ALIGNED == 0) for x in tensors])


def is_current(device: torch.device) -> bool:
    """Whether Triton, which launches on the current device, would launch on this one."""
    return device.type != "cuda" or device.index == torch.cuda.current_device()
