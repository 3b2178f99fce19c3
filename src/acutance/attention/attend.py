"""The one way through attention: a fused kernel, or the model's own product with the mitigation's hooks around it."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from acutance.attention.affine import NOTHING
from acutance.attention.call import AttentionCall
from acutance.attention.kernels import packed

Observer = Callable[[AttentionCall], None]
Hooks = Any  # a Mitigation, whose room is above this one


def attend(call: AttentionCall, mitigation: Hooks = None, observer: Observer | None = None) -> tuple[Tensor, Tensor]:
    """u, laid out as the model's own product would have returned it, and the values that later layers get as v⁰."""
    if mitigation is not None:
        call.check(mitigation)
    fused = _in_one_kernel(call, mitigation) if observer is None else None
    if fused is not None:
        return fused
    if mitigation is None:
        w, u = call.v, call.own(call.v)
    else:
        w = mitigation.values(call.v, call)
        q, k, bias = mitigation.scores(call.q, call.k, call)
        if q is not call.q or k is not call.k or bias is not None:
            call.scored, call.operator = (q, k, bias), None  # A may have been asked for before
        u = mitigation.output(call.own(w), w, call)
    if observer is not None:
        call.values, call.output = w, u
    return u, call.v


def finish(y: Tensor, call: AttentionCall, mitigation: Hooks, observer: Observer | None) -> Tensor:
    """The branch's output, given what came out of W_proj."""
    if mitigation is not None:
        y = mitigation.features(y, call)
    if observer is not None:
        call.branch = y
        observer(call)
    return y


def _in_one_kernel(call: AttentionCall, mitigation: Hooks) -> tuple[Tensor, Tensor] | None:
    """`attend` by one kernel; None where no kernel takes this call."""
    qkv, heads = call.packed, call.v.shape[1]
    is_plain = call.dropout == 0 and call.sink is None and call.kernel == "softmax"
    if qkv is None or not is_plain or not packed.is_available(qkv, heads):
        return None
    program = NOTHING if mitigation is None else mitigation.program(NOTHING, call)
    if program is None:
        return None
    scale = call.v.shape[-1] ** -0.5 if call.scale is None else call.scale
    contrast = None if program.gain is None else 1 + program.gain
    if call.v0 is None:
        merged, values = packed.first_attention(qkv, heads, scale, call.causal, contrast)
        return _by_head(merged, heads), _by_head(values, heads)
    first = call.v0.transpose(1, 2).flatten(2) if program.uses_first_values else None
    first = first.detach() if first is not None and program.detach else first
    merged = packed.attention(qkv, heads, scale, first, program.strength, call.causal, contrast, program.residual)
    return _by_head(merged, heads), call.v


def _by_head(merged: Tensor, heads: int) -> Tensor:
    return merged.unflatten(-1, (heads, -1)).transpose(1, 2)  # type: ignore[no-any-return]
