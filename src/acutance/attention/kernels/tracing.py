"""What tracers need to know about our functions, and whether one is watching an operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_in_traces(function: Function) -> Function:
    """Like `torch.compiler.assume_constant_result`, by its mark: importing the decorator takes seconds."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_watched(x: Tensor) -> bool:
    """Whether a kernel must be called as a registered operation, so that a tracer, mode or transform sees it.

    Otherwise, if no gradient is wanted either, a registered operation would cost CPU time for nothing.
    """
    return (
        torch.compiler.is_compiling()
        or type(x) is not Tensor
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
    )
