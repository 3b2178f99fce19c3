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

from acutance.errors import AcutanceError
from acutance.sites.structure import CONTAINERS

Conditions = tuple[tuple[ast.expr, bool], ...]  # tests, and how they must come out


def norm_before(block: nn.Module, path: str) -> nn.Module | None:
    """The last norm called before the module at `path` in the block, or on its argument; None in Post-LN models.

    Of norms in a module whose code does not show the call it is not known, and refused.
    """
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
    try:
        every = _calls(cls)
    except (OSError, TypeError, SyntaxError):  # code without a file
        every = []
    calls = [call for call, conditions in every if all(_holds(test, is_so, module) for test, is_so in conditions)]
    attention = next((call for call in calls if _called(call) == child), None)
    if attention is None:
        if any(map(_is_norm, module.children())):
            raise AcutanceError(
                f"which norm stands before {child or 'the attention'}, if any, cannot be told from "
                f"{cls.__name__}.forward: describe the model in a Library of its own"
            )
        return None
    end = attention.end_lineno or 0, attention.end_col_offset or 0
    before = [getattr(module, _called(call), None) for call in calls if (call.lineno, call.col_offset) < end]
    return next((norm for norm in reversed(before) if isinstance(norm, nn.Module) and _is_norm(norm)), None)


def _is_norm(module: nn.Module) -> bool:
    """By name; a module with parts is none, whatever it is called (RobertaPreLayerNormAttention)."""
    return "norm" in type(module).__name__.lower() and not any(True for _ in module.children())


@cache
def _calls(cls: Any) -> list[tuple[ast.Call, Conditions]]:
    """The calls of a module's children in the order of the text, and what must hold for each of them."""
    found = _calls_in(ast.parse(textwrap.dedent(inspect.getsource(cls.forward))), ())
    return sorted(found, key=lambda one: (one[0].lineno, one[0].col_offset))


def _calls_in(code: ast.AST, conditions: Conditions) -> Iterator[tuple[ast.Call, Conditions]]:
    if isinstance(code, ast.Call) and _called(code):
        yield code, conditions
    if isinstance(code, ast.If):
        yield from _calls_in(code.test, conditions)
        for branch, is_so in ((code.body, True), (code.orelse, False)):
            for statement in branch:
                yield from _calls_in(statement, (*conditions, (code.test, is_so)))
        return
    for node in ast.iter_child_nodes(code):
        yield from _calls_in(node, conditions)


def _holds(test: ast.expr, is_so: bool, module: nn.Module) -> bool:
    """Unless a flag of the module says otherwise: OPT has its norm on either side."""
    flag = _flag(test, module)
    return flag is None or flag == is_so


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
