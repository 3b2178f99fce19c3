"""What compiled code is told about functions of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_in_traces(function: Function) -> Function:
    """As `torch.compiler.assume_constant_result`, by its mark: the decorator imports the compiler, for seconds."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
