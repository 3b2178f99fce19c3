"""Layers that mix tokens by a scan: Mamba, Mamba-2 and gated delta rules, in models of transformers and others.

Their mixers call one function of their module with all that A is made of: the norms, masks and multipliers of an
architecture have been applied. While somebody observes, that function notes what it is given. It computes what it did.
"""

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from acutance.attention import AttentionCall
from acutance.attention.attend import Observer
from acutance.attention.operator import AttentionOperator
from acutance.attention.products import accumulation_dtype
from acutance.attention.scan import ScanOperator
from acutance.errors import AcutanceError
from acutance.sites.site import Undo
from acutance.sites.structure import Modules, innermost, modules_of, tokens_in, tokens_out

Given = Mapping[str, Any]  # the arguments of a scan function, by name
BESIDE = ("initial_state", "initial_states", "cu_seqlens", "seq_idx")  # tokens before, packed documents


def _mamba(given: Given) -> tuple[AttentionOperator, Tensor]:
    """One head per channel, which share what tokens read and write by; states fade at rates of their own."""
    x = given["hidden_states"]
    step = _step(given["dt"], given["delta_bias"], given["delta_softplus"]).unsqueeze(-1)
    k, q = (given[name].to(step.dtype).mT.unsqueeze(1).expand(-1, x.shape[1], -1, -1) for name in ("B", "C"))
    return ScanOperator(q, k, write=step, decay=step, rates=given["A"]), x.unsqueeze(-1)


def _mamba2(given: Given) -> tuple[AttentionOperator, Tensor]:
    """Groups of heads share what tokens read and write by; all states of a head fade alike."""
    x = given["hidden_states"]
    step = _step(given["dt"].mT, given["dt_bias"], given["dt_softplus"]).clamp(*given["dt_limit"]).unsqueeze(-1)
    k, q = (_by_head(given[name], x.shape[2]) for name in ("B", "C"))
    return ScanOperator(q, k, write=step, decay=step, rates=given["A"].unsqueeze(-1)), x.transpose(1, 2)


def _delta_rule(given: Given) -> tuple[AttentionOperator, Tensor]:
    """Keys have length one; the decay g is by head, or in Kimi's by state too."""
    v, g = given["value"].transpose(1, 2), given["g"].transpose(1, 2)
    q, k = (_by_head(given[name], v.shape[1]) for name in ("query", "key"))
    if given["use_qk_l2norm_in_kernel"]:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    write, decay = given["beta"].mT.unsqueeze(-1), g if g.ndim == 4 else g.unsqueeze(-1)
    return ScanOperator(q * q.shape[-1] ** -0.5, k, write=write, decay=decay, erases=True), v


# By the name of the function that a mixer's forward calls: the operator that its arguments make, and the values.
SCANS: dict[str, Callable[[Given], tuple[AttentionOperator, Tensor]]] = {
    "mamba_selective_scan": _mamba,
    "mamba2_chunk_scan": _mamba2,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
}


def _step(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """Steps in time (batch, heads, tokens)."""
    dt = dt.to(accumulation_dtype(dt))
    dt = dt if bias is None else dt + bias.unsqueeze(-1)
    return F.softplus(dt) if softplus else dt


def _by_head(x: Tensor, heads: int) -> Tensor:
    """(batch, tokens, groups, states) as (batch, heads, tokens, states)."""
    x = x.to(accumulation_dtype(x)).transpose(1, 2)
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def scan_of(module: nn.Module) -> tuple[str, dict[str, Any]] | None:
    """The scan function that the module's forward calls, and the names among which it finds it."""
    if getattr(module, "n_mamba_heads", 1) > 1:  # Zamba's heads are scans of their own, which have no one A
        return None
    forward = inspect.unwrap(type(module).forward)
    names, scope = getattr(getattr(forward, "__code__", None), "co_names", ()), getattr(forward, "__globals__", {})
    return next(((name, scope) for name in SCANS if name in names and name in scope), None)


def scans_in(module: nn.Module) -> Modules:
    """The mixers inside by their paths."""
    return innermost({path: inside for path, inside in modules_of(module).items() if scan_of(inside) is not None})


class ScanSite:
    """A mixer whose matrix can be read. It has no attention weights that `explain` or `mitigate` could act on."""

    def __init__(self, name: str, block: nn.Module, mixer: nn.Module) -> None:
        self.name, self.block, self.attention = name, block, mixer

    def observe(self, fn: Observer) -> Undo:
        """Call `fn` with the `AttentionCall` of every pass; it has no u where metrics of u are refused."""
        stack, key = ExitStack(), object()
        function = scan_of(self.attention)
        assert function is not None, "it is a mixer"

        def leave(_mixer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            seen = _running.seen.pop(key, [])
            if output is not None:  # else an error is on its way
                A, v = self._read(function[0], seen)
                u, x, y = None if A.kernel == "scan" else A @ v, tokens_in(args, kwargs), tokens_out(output)
                about: Any = {"q": A.q, "k": A.k, "mask": A.mask, "causal": A.causal, "x": x, "branch": y}
                fn(AttentionCall(name=self.name, v=v, values=v, operator=A, output=u, **about))

        stack.enter_context(_noting(*function))
        stack.callback(_running.seen.pop, key, None)
        enter = self.attention.register_forward_pre_hook(lambda *_: _running.seen.update({key: []}))
        stack.callback(enter.remove)
        stack.callback(self.attention.register_forward_hook(leave, with_kwargs=True, always_call=True).remove)
        return Undo(stack.close)

    def _read(self, name: str, seen: list[Given]) -> tuple[AttentionOperator, Tensor]:
        where = f"{self.name} ({type(self.attention).__name__})"
        if len(seen) != 1:
            times = f"{where} called {name} {len(seen)} times in one pass"
            raise AcutanceError(f"{times}, so it has no one A: feed whole sequences to a mixer with one scan")
        options = seen[0] | seen[0].get("kwargs", {})
        if told := [option for option in BESIDE if options.get(option) is not None]:
            raise AcutanceError(f"{where} was given {told[0]}: feed whole sequences without a cache, one per row")
        return SCANS[name](seen[0])


class _Running(threading.local):
    def __init__(self) -> None:
        self.seen: dict[object, list[Given]] = {}  # by observer: what scans were given since its mixer was entered


_running, _lock = _Running(), threading.Lock()


@contextmanager
def _noting(name: str, scope: dict[str, Any]) -> Iterator[None]:
    """Have the scan function note what it is given, for the observed mixers that run in its thread."""
    with _lock:
        if not hasattr(scope[name], "observers"):
            scope[name] = _noted(scope[name])
        noted = scope[name]
        noted.observers += 1
    try:
        yield
    finally:
        with _lock:
            noted.observers -= 1
            if not noted.observers:
                scope[name] = noted.__wrapped__


def _noted(own: Callable[..., Any]) -> Any:
    @wraps(own)
    def scan(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(own).bind(*args, **kwargs)
        bound.apply_defaults()
        for seen in _running.seen.values():
            seen.append(bound.arguments)
        return own(*args, **kwargs)

    vars(scan)["observers"] = 0
    return scan
