"""Launching a Triton kernel again and again, for arguments of one kind.

Triton looks at every argument of every launch, to find the code that was compiled for its like. Of kernels that read a
few tokens that takes the host longer than the kernel takes the device, while the arguments are of the same kind from
layer to layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ALIGNED = 16  # bytes: Triton compiles pointers and strides that are multiples of it apart from others


class Launch:
    """A kernel, its grid and its constants; after the first launch the compiled code is called as it is.

    Who keeps one sees to it that all arguments are like those of the first launch: of one dtype, equal where they are
    strides, and of one `placement`, since compiled code takes any address, that of a CPU's tensor too. Numbers that are
    not specialised on may differ.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], constants: dict[str, Any]) -> None:
        self.kernel, self.constants = kernel, constants
        self.grid = (*grid, 1, 1)[:3]
        self._run: Any = None
        self._code: tuple[Any, ...] = ()
        self._values: tuple[Any, ...] = ()

    def __call__(self, tensors: Sequence[Tensor], *numbers: float) -> None:
        """In the current stream of the current device, where the tensors are; they come first among the arguments."""
        if self._run is not None:
            stream = torch._C._cuda_getCurrentRawStream(tensors[0].get_device())
            # Of a tensor Triton would ask the driver where it is.
            pointers = [x.data_ptr() for x in tensors]
            self._run(*self.grid, stream, *self._code, *pointers, *numbers, *self._values)
            return
        compiled = self.kernel[self.grid](*tensors, *numbers, **self.constants)
        if compiled is not None:  # the interpreter compiles nothing
            self._values = tuple(self.constants[name] for name in self.kernel.arg_names[len(tensors) + len(numbers) :])
            self._code = (compiled.function, compiled.packed_metadata, None, None, None)  # no profiler's hooks
            self._run = compiled.run


def placement(*tensors: Tensor) -> tuple[tuple[int, bool], ...]:
    """Where the tensors are: by number the device of each, and whether it begins at a multiple of `ALIGNED`."""
    return tuple([(x.get_device(), x.data_ptr() % ALIGNED == 0) for x in tensors])


def is_current(device: torch.device) -> bool:
    """Whether Triton, which launches on the current device, would launch on this one."""
    return device.type != "cuda" or device.index == torch.cuda.current_device()
