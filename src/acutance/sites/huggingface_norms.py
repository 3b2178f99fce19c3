"""Which norm stands before an attention of transformers: read off the code that calls both.

The same name means a norm before the attention in one model and after it in another (BART and mBART), so names
cannot tell.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from acutance.sites.blocks import CONTAINERS


def norm_before(block: nn.Module, path: str) -> nn.Module | None:
    """The last norm called before the module at `path` in the block, or on its argument; None in Post-LN models."""
    found, module = None, block
    for name in path.split("."):
        if not isinstance(module, CONTAINERS):
            found = _norm_before_child(module, name) or found
        module = module.get_submodule(name)
    return found


def adds_one(norm: nn.Module) -> bool:
    """Whether the norm multiplies by 1 + weight, as Gemma's do: tried on tokens that are normalised already."""
    weight: Tensor = norm.weight  # type: ignore[assignment]
    token = 1 - 2 * (torch.arange(weight.shape[-1], device=weight.device) % 2).to(weight.dtype)
    with torch.no_grad():
        gain = token * (norm.forward(token) - norm.forward(-token)) / 2  # without its bias
        return bool((gain - weight).abs().sum() > (gain - 1 - weight).abs().sum())


def _norm_before_child(module: nn.Module, child: str) -> nn.Module | None:
    cls: Any = type(module)
    calls = sorted(_calls(_forward(cls), module), key=lambda call: (call.lineno, call.col_offset))
    attention = next((call for call in calls if _called(call) == child), None)
    if attention is None:
        return None
    end = attention.end_lineno or 0, attention.end_col_offset or 0
    before = [getattr(module, _called(call), None) for call in calls if (call.lineno, call.col_offset) < end]
    return next((norm for norm in reversed(before) if isinstance(norm, nn.Module) and _is_norm(norm)), None)


def _is_norm(module: nn.Module) -> bool:
    """By name; a module with parts is none, whatever it is called (RobertaPreLayerNormAttention)."""
    return "norm" in type(module).__name__.lower() and not any(True for _ in module.children())


@cache
def _forward(cls: Any) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(cls.forward)))


def _calls(code: ast.AST, module: nn.Module) -> Iterator[ast.Call]:
    """The calls of the module's children, left out what its flags switch off: OPT has its norm on either side."""
    for node in ast.iter_child_nodes(code):
        if isinstance(node, ast.If) and (flag := _flag(node.test, module)) is not None:
            for statement in node.body if flag else node.orelse:
                yield from _calls(ast.Module([statement], []), module)
            continue
        if isinstance(node, ast.Call) and _called(node):
            yield node
        yield from _calls(node, module)


def _flag(test: ast.expr, module: nn.Module) -> bool | None:
    """What `self.flag` or `not self.flag` is; None for any other condition."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        flag = _flag(test.operand, module)
        return None if flag is None else not flag
    value = getattr(module, _of_self(test), None)
    return value if isinstance(value, bool) else None


def _called(call: ast.Call) -> str:
    return _of_self(call.func)


def _of_self(code: ast.expr) -> str:
    """`name` for `self.name`, else nothing."""
    is_own = isinstance(code, ast.Attribute) and isinstance(code.value, ast.Name) and code.value.id == "self"
    return code.attr if is_own and isinstance(code, ast.Attribute) else ""
