"""Attention layers of libraries we did not write: led through us while something is installed or observed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from acutance.attention import AttentionCall, attend, finish
from acutance.attention.attend import Observer
from acutance.attention.call import MISSING
from acutance.errors import TOKENS_REMAIN, AcutanceError, NoSitesError, ShapeError
from acutance.mitigations import Mitigation
from acutance.sites.forward_pass import ForwardPass, Passes, TokenOrder, first_values
from acutance.sites.intercept import Intercept, Product
from acutance.sites.site import AttentionSite, Library, Undo
from acutance.sites.structure import ADVICE, CONTAINERS, Layer, outwards, tokens_in, tokens_out

SITE = "_acutance_site"  # where an attention module keeps its site while it is routed


class Stack:
    """The attention layers that follow one another in a model, and the module whose forward runs them all."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.sites: list[PatchedSite] = []
        self.passes = Passes()
        self.hooks: list[Any] = []  # while it is routed
        self.is_order_known = True  # whether a forward pass has shown that tokens keep their places

    def route(self) -> None:
        """Lead every layer's attention through its site."""
        if self.hooks:
            return
        try:
            self.hooks.append(self.root.register_forward_pre_hook(self._begin))
            for site in self.sites:
                site.route()
                self.hooks.append(site.block.register_forward_pre_hook(site._enter_block, with_kwargs=True))
                self.hooks.append(site.block.register_forward_hook(site._leave_block, always_call=True))
            # After those of the blocks: the root may be the only one.
            self.hooks.append(self.root.register_forward_hook(self._end, always_call=True))
        except BaseException:  # never leave a model half patched
            self._unroute()
            raise

    def settle(self) -> None:
        """Give the model its own attention back once none is mitigated or observed."""
        if all(site.mitigation is None and site.observer is None for site in self.sites):
            self._unroute()

    def _unroute(self) -> None:
        while self.hooks:
            self.hooks.pop().remove()
        for site in reversed(self.sites):
            if site.attention.__dict__.get(SITE) is site:
                site.unroute()

    def _begin(self, root: nn.Module, _args: Any) -> None:
        if getattr(root, "_is_replica", False):
            raise AcutanceError("nn.DataParallel runs copies of the model in threads: use DistributedDataParallel")
        now = self.passes.begin(whole=True)
        if not self.is_order_known and not torch.compiler.is_compiling():
            now.order = TokenOrder()

    def _end(self, _root: nn.Module, _args: Any, output: Any) -> None:
        ended = self.passes.end()
        if output is None or ended is None:  # an error is on its way
            return
        if ended.attended < ended.entered:
            raise AcutanceError(
                f"nobody saw the attention of {ended.entered - ended.attended} of {ended.entered} blocks: "
                f"{type(self.sites[0].attention).__name__} uses neither scaled_dot_product_attention nor a softmax and "
                f"a product. {TOKENS_REMAIN}"
            )
        if ended.order is not None:
            ended.order.refuse_moved()
            self.is_order_known = True


class PatchedSite(AttentionSite):
    """One layer's attention in a library we did not write. By default it is intercepted as it runs."""

    def __init__(self, stack: Stack, layer: Layer) -> None:
        self.stack = stack
        self.layer, self.name, self.block, self.attention, self.stage = layer
        self.observer: Observer | None = None
        self._forward: Callable[..., Any] | None = None  # another one's patch of the attention's forward
        self._projection: nn.Module | None = None  # W_proj, where a hook on it ends the branch
        self._is_hooked = False
        stack.sites.append(self)

    def route(self) -> None:
        """Make the attention run through `attend`."""
        attention = self.attention
        other = vars(attention).get(SITE)
        if other is not None:  # that of a part found by itself, which has other neighbours
            part = self.name.removesuffix(other.name).rstrip(".") or type(other.stack.root).__name__
            raise AcutanceError(
                f"{self.name} is mitigated or observed already as a layer of the part {part!r} by itself: go on with "
                f"part={part!r}, or take that out and mitigate the whole, with layers= for some layers only"
            )
        self._forward = vars(attention).get("forward")
        vars(attention)[SITE] = self
        attention.forward = partial(type(self).forward, self)  # Dynamo of torch 2.6 does not trace a bound method here
        self._projection = self.output_projection()

    def _hook_projection(self) -> None:
        """Make `finish` run after W_proj, once somebody changes or observes what comes out of it."""
        is_asked = self.observer is not None or (self.mitigation is not None and self.mitigation.overrides("features"))
        if is_asked and self._projection is not None and not self._is_hooked:
            self.stack.hooks.append(self._projection.register_forward_hook(self._finish_projection))
            self._is_hooked = True

    def unroute(self) -> None:
        """Give the attention its own forward back."""
        for name in (SITE, "forward"):
            vars(self.attention).pop(name, None)
        if self._forward is not None:
            self.attention.forward = self._forward
        self._forward, self._is_hooked = None, False

    def output_projection(self) -> nn.Module | None:
        """The module of W_proj, where it is one; None takes what the attention returns for the branch's output."""
        return None

    @property
    def mitigation(self) -> Mitigation | None:
        installed = self.attention._modules.get("mitigation")
        return installed if isinstance(installed, Mitigation) else None

    def replace(self, mitigation: Mitigation | None) -> None:
        """As a submodule of the attention, so that its parameters are the model's."""
        if self.mitigation is None and hasattr(self.attention, "mitigation"):
            raise AcutanceError(f"{self.name} has something else called 'mitigation': rename it")
        if mitigation is not None:
            self.stack.route()
            self.stack.is_order_known &= "first_values" not in mitigation.requires
            self.attention.mitigation = mitigation
            self._hook_projection()
        else:
            del self.attention.mitigation
            self.stack.settle()

    def observe(self, fn: Observer) -> Undo:
        if self.observer is not None:
            raise AcutanceError(f"{self.name} is being observed already: remove the other observer first")
        self.stack.route()
        self.observer = fn
        self._hook_projection()
        return Undo(self._unobserve)

    def _unobserve(self) -> None:
        self.observer = None
        self.stack.settle()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """In place of the attention's own forward: that one, watched."""
        x, done = tokens_in(args, kwargs), False
        again = self.stack.passes.recompute_attention(x)
        if again and self.mitigation is not None:
            self.mitigation.enter()
        try:
            output = self._run(x, args, kwargs)
            done = True
        finally:
            if again:
                self._leave()
            elif not done and self.mitigation is not None:  # torch calls no hook after a KeyboardInterrupt
                self.mitigation.leave()
        return output

    def _run(self, x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        now = self.now(x)
        own = self._forward or partial(type(self.attention).forward, self.attention)
        now.behind = self.keys_behind(kwargs)
        if not self.is_active:
            now.attended += 1
            return own(*args, **kwargs)
        if self.is_called(kwargs):
            output = own(*args, **kwargs)
        else:
            with Intercept(self.attend, x, self.name):
                output = own(*args, **kwargs)
        is_missed = self._is_hooked and now.call is not None  # it may be called later, or a function had its weight
        if self._projection is not None and not (is_missed and self._projection in set(self.attention.modules())):
            return output
        y = self.finish(tokens_out(output), now)
        return y if isinstance(output, Tensor) else (y, *output[1:])

    @property
    def is_active(self) -> bool:
        """Whether anybody wants to know what this attention does; of the first, later layers want the values."""
        return self.mitigation is not None or self.observer is not None or self.layer == 1

    def is_called(self, _arguments: Mapping[str, Any]) -> bool:
        """Whether the library itself hands us the attention it runs with these, so that nobody need watch it."""
        return False

    def keys_behind(self, _arguments: Mapping[str, Any]) -> int:
        """How many keys of other tokens follow its own, as an encoder's do in T5Gemma 2."""
        return 0

    def now(self, x: Tensor) -> ForwardPass:
        """The forward pass that this attention, given x, is part of."""
        passes = self.stack.passes
        now = passes.current() or passes.enter(self.layer, x)  # where the attention was called by itself
        is_new = self.layer > 1 and x is not now.x and not now.again
        if is_new and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            passes.remember(x, now)
        now.entering = x
        return now

    def attend(self, product: Product) -> Tensor:
        """u of this layer, mitigated and observed."""
        now, mitigation = self.stack.passes.current(), self.mitigation
        assert now is not None, "begun as the attention was entered"
        v0: Any = None if self.layer == 1 else MISSING if now.v0 is None else now.v0
        if mitigation is not None:
            requires = mitigation.requires
            if "first_values" in requires or "all_tokens" in requires:
                self._refuse_tokens(mitigation, product.v, now)
            if "first_values" in requires and self.layer > 1:
                v0 = first_values(now, self.name)
        known: dict[str, Any] = {"name": self.name, "x": now.entering, "behind": now.behind}
        if mitigation is not None:
            known["previous"] = now.kept.get(self.layer - 1)
            if now.x is not None and (mitigation.overrides("stream") or "residual" in mitigation.requires):
                known["residual"] = self.tokens(now.x)
        call = AttentionCall(layer=self.layer, v=product.v, first=v0, product=product.own, **known, **product.about)
        if now.order is not None and now.entering is not None:
            now.order.attend(self.name, now.entering)
        u, values = attend(call, mitigation, self.observer)
        if self.layer == 1:
            now.v0, now.with_grad = values, torch.is_grad_enabled()
        now.attended += 1
        now.call = now.attention = call
        if call.kept is not None:
            now.kept[self.layer] = call.kept
        return u

    def finish(self, y: Tensor, now: ForwardPass) -> Tensor:
        """The branch's output, given what came out of W_proj."""
        call, now.call = now.call, None
        mitigation = self.mitigation
        changes = mitigation is not None and mitigation.overrides("features")
        if call is None or not (changes or self.observer is not None):
            return y
        if not isinstance(y, Tensor):
            raise AcutanceError(f"{self.name}: out of W_proj a {type(y).__name__} comes in place of tokens. {ADVICE}")
        if mitigation is not None and changes:
            self._refuse_windows(mitigation, y, now)
        if torch.compiler.is_compiling():
            return finish(y, call, mitigation, self.observer)
        with torch._C.DisableTorchFunction():  # W_proj may stand where we still watch: what we do is no attention
            return finish(y, call, mitigation, self.observer)

    def _finish_projection(self, _module: nn.Module, _args: Any, y: Tensor) -> Tensor:
        now = self.stack.passes.current()
        return y if now is None else self.finish(y, now)

    def _enter_block(self, _block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        now = self.stack.passes.enter(self.layer, x := tokens_in(args, kwargs))
        if now.order is not None:
            now.order.enter_block(x)
        mitigation = self.mitigation
        if mitigation is not None:
            mitigation.enter()

    def _leave_block(self, _block: nn.Module, _args: Any, output: Any) -> Any:
        now, mitigation = self.stack.passes.current(), self.mitigation
        call = None if now is None or output is None else now.attention
        if now is not None and now.order is not None:
            now.order.leave_block(output)
        if call is not None and mitigation is not None and mitigation.overrides("stream"):
            assert call.residual is not None, "known as the block was entered"
            out = tokens_out(output)
            x = self.like(mitigation.stream(call.residual, self.tokens(out), call), out)
            output = x if isinstance(output, Tensor) else (x, *output[1:])
        self._leave()
        return output

    def _leave(self) -> None:
        mitigation = self.mitigation
        if mitigation is not None:
            mitigation.leave()
        if not torch.compiler.is_compiling():
            self.stack.passes.leave()

    def refuse_first_values(self) -> str | None:
        """Why v⁰ cannot be used here, if it cannot."""
        if has_windows(self.attention):
            return "its windows are shifted from layer to layer, so v⁰ and v do not belong to the same tokens"
        if any(hasattr(self.attention, name) for name in ("sr", "sequence_reduction")):  # PVT v2 and SegFormer
            return "it merges tokens before making keys and values, so v⁰, v and u do not match"
        stages = list(dict.fromkeys(site.stage for site in self.stack.sites))
        if len(stages) > 1:
            return f"tokens may be merged between its stages ({', '.join(stages)}): name one with part={stages[0]!r}"
        first = self.stack.sites[0]
        with suppress(NoSitesError):  # where weights are not known, the shapes of a forward pass tell
            if (sizes := (self.kv_heads, self.head_dim)) != (of_first := (first.kv_heads, first.head_dim)):
                alike = [site.layer for site in self.stack.sites if (site.kv_heads, site.head_dim) == of_first]
                what = "its values have {} heads of {} channels and v⁰, layer 1's, has {} of {}"
                return f"{what.format(*sizes, *of_first)}: name those like layer 1 with layers={alike}"
        return None

    def refuse(self, mitigation: Mitigation) -> None:
        super().refuse(mitigation)
        reason = self.refuse_first_values() if "first_values" in mitigation.requires else None
        if reason is None and "all_tokens" in mitigation.requires and has_windows(self.attention):
            reason = "its W_proj sees one window at a time, so the mean would not run over the image's tokens"
        if reason is None and "all_visible" in mitigation.requires and getattr(self.attention, "is_causal", False):
            reason = "its attention is causal, and the mean over tokens would show them the future"
        if reason is not None:
            raise AcutanceError(f"{mitigation.spec} cannot be used in {self.name}: {reason}")

    def _refuse_windows(self, mitigation: Mitigation, y: Tensor, now: ForwardPass) -> None:
        """A batch of another size than the block's is one of windows."""
        if torch.compiler.is_compiling() or "all_tokens" not in mitigation.requires or now.x is None:
            return
        batch = len(self.tokens(now.x))
        if y.ndim != 3 or batch != len(y):
            raise AcutanceError(
                f"{mitigation.spec} averages over tokens, but W_proj of {self.name} sees {tuple(y.shape)} of a batch "
                f"of {batch}: windows, or samples in one row. Use a mitigation without means, such as neutreno"
            )

    def _refuse_tokens(self, mitigation: Mitigation, v: Tensor, now: ForwardPass) -> None:
        """Refuse v⁰ of other tokens than v's: a second run, merged tokens, windows cut in the block."""
        if "first_values" in mitigation.requires and self.layer <= now.attended and not now.again:
            raise AcutanceError(
                f"{self.name} ran more than once in a forward pass, so {mitigation.spec} cannot tell which layer is "
                "the first. With activation checkpointing, put torch.compile around it, not inside"
            )
        shape = () if now.x is None else tuple(now.x.shape)
        if len(shape) > 2 and v.shape[0] not in shape[: 2 if len(shape) == 3 else 1]:
            raise ShapeError(
                f"{self.name}: the block was given {shape}, its attention a batch of {v.shape[0]}, perhaps of windows, "
                f"so v⁰ or a mean may be of other tokens: {mitigation.spec} needs a Library of its own for this model"
            )


def has_windows(attention: nn.Module) -> bool:
    """Whether it attends within windows that are shifted from layer to layer."""
    return type(attention).__name__.startswith(("WindowAttention", "Swin", "ClapAudio"))


def make_sites(library: Library, model: nn.Module, layers: Sequence[Layer]) -> list[AttentionSite]:
    """The sites of a model's layers; those that are there already while it is routed."""
    known = [layer.attention.__dict__.get(SITE) for layer in layers]
    if all(site is not None for site in known):
        return known  # type: ignore[return-value]
    stages = [outwards(layer.stage) for layer in layers]
    common = (model.get_submodule(up) for up in stages[0] if all(up in stage for stage in stages))
    # The innermost one around all stages that has a forward of its own to run them.
    stack = Stack(next((m for m in common if not isinstance(m, (*CONTAINERS, nn.ModuleDict))), model))
    return [library.site(stack, layer) for layer in layers]
