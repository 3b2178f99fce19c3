"""Attention layers of libraries we did not write: diverted through us while something is installed or observed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from acutance.errors import AcutanceError
from acutance.mitigations import Mitigation
from acutance.operator import AttentionOperator, AttentionRecord
from acutance.sites.base import TOKENS_REMAIN, AttentionSite, Undo
from acutance.sites.stream import Stream, in_backward

SITE = "_acutance_site"  # where an attention module keeps its site while it is diverted
# Why windows refuse what compares or averages tokens.
WINDOWS_MOVE = "its windows are shifted from layer to layer, so v⁰ and v do not belong to the same tokens"
WINDOWS_APART = "its W_proj sees one window at a time, so the mean would not run over the image's tokens"


class Stack:
    """The attention layers that follow one another in a model, and the module whose forward runs them all."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.sites: list[PatchedSite] = []
        self.stream = Stream()
        self.running = False
        self._users = 0
        self._undos: list[Callable[[], None]] = []

    def divert(self) -> None:
        """Lead every layer's attention through its site; `restore` as often as this."""
        if self._users == 0:
            try:
                self._divert()
            except BaseException:  # never leave a model half patched
                self._undo()
                raise
        self._users += 1

    def restore(self) -> None:
        """Give the model its own attention back once nobody needs ours."""
        self._users -= 1
        if self._users == 0:
            self._undo()

    def _divert(self) -> None:
        self._refuse_another_stack()
        add = self._undos.append
        add(self.root.register_forward_pre_hook(self._begin).remove)
        add(self.root.register_forward_hook(self._end, always_call=True).remove)
        for site in self.sites:
            site.attention.__dict__[SITE] = site
            add(_Forget(site.attention))
            add(site.divert())
            add(site.block.register_forward_pre_hook(site._enter_block, with_kwargs=True).remove)

    def _refuse_another_stack(self) -> None:
        """An attention module has one site at a time: that of a part found by itself has other neighbours."""
        for site in self.sites:
            other = site.attention.__dict__.get(SITE)
            if other is not None:
                part = site.name.removesuffix(other.name).rstrip(".") or type(other.stack.root).__name__
                raise AcutanceError(
                    f"{site.name} is mitigated or observed already as a layer of the part {part!r} by itself: go on "
                    f"with part={part!r}, or take that out and mitigate the whole, with layers= for some layers only"
                )

    def _undo(self) -> None:
        while self._undos:
            self._undos.pop()()

    def _begin(self, root: nn.Module, _args: Any) -> None:
        if getattr(root, "_is_replica", False):
            raise AcutanceError("nn.DataParallel runs copies of the model in threads: use DistributedDataParallel")
        self.stream.begin()
        self.running = True
        for site in self.sites:
            site.ran = False

    def _end(self, _root: nn.Module, _args: Any, output: Any) -> None:
        self.stream.begin()
        self.running = False
        if output is None or torch.compiler.is_compiling():  # None: an error is on its way already
            return
        idle = [site for site in self.sites if not site.ran]
        if idle:
            raise AcutanceError(
                f"{idle[0].name} ({type(idle[0].attention).__name__}) did not call its attention through us in this "
                f"forward pass, so neither mitigations nor attention metrics would see it ({len(idle)} such layers). "
                f"{TOKENS_REMAIN}"
            )


class PatchedSite(AttentionSite):
    """One layer's attention in a library we did not write. A library overrides the abstract methods and `divert`."""

    def __init__(self, stack: Stack, layer: int, name: str, block: nn.Module, attention: nn.Module) -> None:
        self.stack, self.layer, self.name, self.block, self.attention = stack, layer, name, block, attention
        self.observer: Callable[[AttentionRecord], None] | None = None
        self.ran = False
        self._seen: tuple[AttentionOperator, Tensor, Tensor | None, Tensor] | None = None
        self._entered: Tensor | None = None
        self._batch: int | None = None  # of the block's input
        stack.sites.append(self)

    @abstractmethod
    def divert(self) -> Callable[[], None]:
        """Make the attention call `attend`, and `finish` after W_proj; the returned function undoes it."""

    @property
    def mitigation(self) -> Mitigation | None:
        """What is installed here now."""
        installed = self.attention._modules.get("mitigation")
        return installed if isinstance(installed, Mitigation) else None

    def install(self, mitigation: Mitigation) -> Callable[[], None]:
        """As a submodule of the attention, so that its parameters are the model's."""
        if self.mitigation is not None:
            raise AcutanceError(f"{self.name} carries {self.mitigation.spec!r} already: take it out first")
        if hasattr(self.attention, "mitigation"):
            raise AcutanceError(f"{self.name} has something else called 'mitigation': rename it")
        self._refuse(mitigation)
        self.stack.divert()
        try:
            mitigation.parametrise(self)
        except BaseException:
            self.stack.restore()
            raise
        self.attention.mitigation = mitigation

        def undo() -> None:
            del self.attention.mitigation
            mitigation.unparametrise(self)
            self.stack.restore()

        return undo

    def observe(self, fn: Callable[[AttentionRecord], None]) -> Undo:
        """One observer at a time."""
        if self.observer is not None:
            raise AcutanceError(f"{self.name} is being observed already: remove the other observer first")
        self.stack.divert()
        self.observer = fn

        def undo() -> None:
            self.observer = self._seen = None
            self.stack.restore()

        return Undo(undo)

    def attend(
        self, v: Tensor, attention: Callable[[Tensor], Tensor], operator: Callable[[], AttentionOperator]
    ) -> Tensor:
        """u for the values v: `attention` is the library's own A·, `operator` makes A where it is asked for.

        v and u are (batch, heads, tokens, head_dim), v possibly of fewer heads.
        """
        mitigation, is_first = self.mitigation, self is self.stack.sites[0]
        if mitigation is not None and mitigation.needs_first_values:
            self._refuse_second_run(mitigation)
        self.ran = True
        if is_first:
            self.stack.stream.keep(v)
        if mitigation is None and self.observer is None:
            return attention(v)
        A = operator()
        if mitigation is None:
            u = attention(v)
        else:
            needs_first = mitigation.needs_first_values and not is_first
            first = self.stack.stream.first_values(self.name) if needs_first else v
            v = mitigation.values(v, first)
            u = mitigation.output(attention(v), v, first, A)
        if self.observer is not None:
            self._seen = A, v, None if is_first else self.stack.stream.peek(), u
        return u

    def finish(self, y: Tensor) -> Tensor:
        """The branch's output, given what came out of W_proj."""
        mitigation = self.mitigation
        if mitigation is not None and mitigation.changes_features:
            self._refuse_windows(mitigation, y)
            assert self._entered is not None, "set as the attention was entered"
            y, self._entered = mitigation.features(y, self._entered), None
        if self.observer is not None and self._seen is not None:
            (A, v, first, u), self._seen = self._seen, None
            self.observer(AttentionRecord(operator=A, values=v, first_values=first, output=u, branch=y))
        return y

    def enter_attention(self, _module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A forward pre-hook for libraries whose attention is a module: what enters the branch."""
        mitigation = self.mitigation
        if mitigation is not None and mitigation.changes_features:
            self._entered = tokens_in(args, kwargs)

    def finish_projection(self, _module: nn.Module, _args: Any, y: Tensor) -> Tensor:
        """A forward hook for libraries whose W_proj is a module."""
        return self.finish(y)

    def refuse_first_values(self) -> str | None:
        """Why v⁰ cannot be used here, if it cannot: windows that move, tokens that are merged."""
        return None

    def refuse_average(self) -> str | None:
        """Why a mean over tokens cannot be taken after W_proj, if it cannot: it sees windows, or must not see all."""
        return None

    def _refuse(self, mitigation: Mitigation) -> None:
        reasons = [
            self.refuse_first_values() if mitigation.needs_first_values else None,
            self.refuse_average() if averages(mitigation) else None,
        ]
        for reason in reasons:
            if reason is not None:
                raise AcutanceError(f"{mitigation.spec} cannot be used in {self.name}: {reason}")

    def _refuse_windows(self, mitigation: Mitigation, y: Tensor) -> None:
        """A batch of another size than the block's is one of windows."""
        if torch.compiler.is_compiling() or not averages(mitigation):
            return
        if y.ndim != 3 or self._batch not in (None, len(y)):
            raise AcutanceError(
                f"{mitigation.spec} averages over tokens, but W_proj of {self.name} sees {tuple(y.shape)} of a batch "
                f"of {self._batch}: windows, or samples in one row. Use a mitigation without means, such as neutreno"
            )

    def _refuse_second_run(self, mitigation: Mitigation) -> None:
        """Layers that share a module have no first one to tell from the others."""
        if torch.compiler.is_compiling() or in_backward() or not (self.stack.running and self.ran):
            return
        raise AcutanceError(
            f"{self.name} ran more than once in a forward pass, so {mitigation.spec} cannot tell the first layer "
            "from the others: it cannot be used where layers share a module"
        )

    def _enter_block(self, _block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        x = tokens_in(args, kwargs)
        if not torch.compiler.is_compiling():
            self._batch = len(self.tokens(x))
        self.stack.stream.enter(self.stack.sites.index(self) + 1, x)


def averages(mitigation: Mitigation) -> bool:
    """Whether the mitigation, or a part of it, takes means over tokens."""
    return any(isinstance(part, Mitigation) and part.averages_tokens for part in mitigation.modules())


class _Forget:
    """Takes the site off its attention module; an object, so that a copied model gets its own."""

    def __init__(self, attention: nn.Module) -> None:
        self.attention = attention

    def __call__(self) -> None:
        self.attention.__dict__.pop(SITE, None)


def known_sites(attentions: Iterable[nn.Module]) -> list[PatchedSite] | None:
    """The sites of a stack that is diverted already."""
    found = [attention.__dict__.get(SITE) for attention in attentions]
    return None if not found or any(site is None for site in found) else found  # type: ignore[return-value]


def tokens_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The tokens among a module's arguments: the first tensor."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value
    raise AcutanceError(f"no tensor among the arguments {list(kwargs)} of a block")


def tokens_out(output: Any) -> Tensor:
    """The tokens in what a block returns: itself, or the first of a tuple."""
    tokens = output if isinstance(output, Tensor) else output[0]
    assert isinstance(tokens, Tensor)
    return tokens


def caller_of(model: nn.Module, paths: Sequence[str]) -> nn.Module:
    """The innermost module around all these paths that has a forward of its own to run them."""
    common = paths[0].split(".")[:-1]
    for path in paths:
        parts = path.split(".")
        while common != parts[: len(common)]:
            common.pop()
    while common:
        module = model.get_submodule(".".join(common))
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            return module
        common.pop()
    return model
