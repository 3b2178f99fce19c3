"""What compiled code is told about functions of ours, and who looks on when an operation is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_in_traces(function: Function) -> Function:
    """As `torch.compiler.assume_constant_result`, by its mark: the decorator imports the compiler, for seconds."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_watched(x: Tensor) -> bool:
    """Whether a kernel must be called as a registered operation, for a tracer, a mode or a transform to see it.

    Where nobody looks, and no gradient is wanted, the way there is the host's time for nothing.
    """
    return (
        torch.compiler.is_compiling()
        or type(x) is not Tensor
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
    )
