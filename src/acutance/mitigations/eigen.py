"""Eigen: a layer whose H has the spectrum you choose (Setting the Record Straight on Oversmoothing, 2401.04301)."""

import itertools
import math
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from acutance.errors import AcutanceError, ShapeError, require_finite
from acutance.mitigations import orthogonal
from acutance.mitigations.base import LayerShape, Mitigation, parts_of, register
from acutance.mitigations.projection import Projection

Sign = Literal["negative", "positive", "free"]
BasisName = Literal["qr", "polar", "cayley", "householder", "inverse"]
Spectrum = Literal["square", "clipped", "bounded"]
Weights = tuple[Tensor, Tensor]  # W_V and W_proj, (dim, dim) each
BASES = {**orthogonal.BASES, "inverse": orthogonal.Basis(lambda theta: theta)}

# How far inside an eigenvalue starts where the border itself has no gradient: ψ² at 0, a sigmoid at 0 and 1.
EDGE = 1e-3


class _Local(threading.local):
    """Per thread: the key of the layer whose block runs, and its W_V and W_proj once made. Dynamo can guard a list."""

    def __init__(self) -> None:
        self.running: list[Any] = [None, None, None]


_LOCAL = _Local()
_KEYS = itertools.count()


@register("eigen")
class Eigen(Mitigation):
    """H = V Λ Vᵀ with the signs of Λ decided in advance: ViT⁻ and ViT⁺ (https://arxiv.org/abs/2401.04301).

    In the paper's letters W_V = V and W_proj = Λ Vᵀ, made from Θ and ψ at every forward, in any model whose attention
    has as many value heads as query heads. The heads share the columns of V in order, so the H of a head has its own
    part of Λ as its eigenvalues, and the heads' terms add up to H.

    It does not start at the identity. A trained layer starts from the *closest* admissible H: the symmetric part of its
    H with clipped eigenvalues. `distance` says how far that is. The values' bias adds a constant W_proj b_V to every
    token, which stays: the projection's bias makes up for the new W_proj. A new layer starts from the eigenvectors of
    the symmetric part of its initial H, with eigenvalues of the wanted sign, scaled to the norm of that H.

    Args:
        sign: of the eigenvalues. Negative sharpens (ViT⁻), positive smooths (ViT⁺), free is both.
        basis: where V comes from. "qr" is the poster's; "polar" (Newton–Schulz), "cayley" and "householder" make an
            orthogonal V too; with "inverse" V is free and W_proj = Λ V⁻¹, as in the paper's later version.
        spectrum: λ from ψ. "square" is the poster's ±ψ² (free: ψ). A negative λ sharpens only above −2/(1 + μ_min),
            μ_min < 1 being attention's smallest eigenvalue, and −ψ² may fall below: see `check_spectrum`. "clipped"
            cuts off at ±1 and 0; "bounded" is ∓σ(ψ) (free: tanh ψ). These two stay in [−1, 1], but
            the norm before the attention multiplies them by γ/σ.
    """

    positional = "sign"
    requires = ("nothing_between",)
    shape: LayerShape
    theta: nn.Parameter
    psi: nn.Parameter

    def __init__(self, sign: Sign = "negative", basis: BasisName = "qr", spectrum: Spectrum = "square") -> None:
        super().__init__()
        self.sign, self.basis, self.spectrum = sign, basis, spectrum
        self.check_options()
        self._biases: tuple[Tensor, Tensor] | None = None  # of its projection, before and after parametrise
        self.key = next(_KEYS)  # Dynamo of torch 2.6 knows no id of a module

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.key = next(_KEYS)  # a copy is another layer

    def build(self, shape: LayerShape) -> None:
        """Θ and ψ of one layer, which `parametrise` fills from the layer's own weights."""
        self.theta = nn.Parameter(torch.eye(shape.dim))
        self.psi = nn.Parameter(torch.ones(shape.dim))

    def parametrise(self, value: Projection, output: Projection) -> None:
        """Choose Θ and ψ for the present W_V and W_proj, then make the two from them."""
        for projection in (value, output):
            projection.refuse_parametrisation()
        before, shape = (value.matrix(), output.matrix()), self.shape
        if not before[0].shape == before[1].shape == (shape.dim, shape.dim):
            sizes = f"{shape.heads} query and {shape.kv_heads} value heads of {shape.head_dim} for {shape.dim} channels"
            needs = "heads · head_dim = dim and a value head for every query head; name the layers that have them"
            raise ShapeError(f"eigen: layer {shape.layer} has {sizes}: V Λ Vᵀ needs {needs} in layers=[...]")
        if not before[0].is_meta:
            self._start(*before)
        if shape.pretrained:
            self._keep_constant(value, output)
        value.parametrise(self, partial(self._made, 0))
        output.parametrise(self, partial(self._made, 1))

    @torch.no_grad()
    def unparametrise(self, value: Projection, output: Projection) -> None:
        """Give a trained layer back what it had, a new one what it has now."""
        for projection in (output, value):
            projection.unparametrise(keep=not self.shape.pretrained)
        if self._biases is not None and (bias := output.offset()) is not None:
            before, after = (old.to(bias) for old in self._biases)
            # Bit for bit if nothing happened to it; what it has learnt since stays.
            bias.copy_(before if torch.equal(bias, after) else bias + (before - after))
            self._biases = None

    def enter(self) -> None:
        """Until `leave`, V is made once for both weights; a graph has it before the attention, which is watched."""
        made = self.weights() if torch.compiler.is_compiling() else (None, None)
        _LOCAL.running[:] = [self.key, *made]

    def leave(self) -> None:
        """Forget V after the block's run: the next optimiser step changes Θ."""
        _LOCAL.running[:] = [None, None, None]

    def _made(self, which: int) -> Tensor:
        """W_V (0) or W_proj (1): made together, once per run of the block; elsewhere, whenever one is needed."""
        learns = torch.is_grad_enabled() and (self.theta.requires_grad or self.psi.requires_grad)
        if _LOCAL.running[0] == self.key:
            if _LOCAL.running[1] is None:
                _LOCAL.running[1:] = self.weights()
            made: Tensor = _LOCAL.running[1 + which]
            if made.requires_grad or not learns:  # else of a part that re-entrant checkpointing ran
                return made
        elif which == 1 and learns and not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            # Within a backward pass: a part of the forward pass is recomputed.
            advice = "W_V, which are made together: put it around the attention or around the whole block"
            raise AcutanceError(f"eigen: checkpointing in layer {self.shape.layer} has W_proj in it but not {advice}")
        return self.weights()[which]

    def weights(self) -> Weights:
        """W_V and W_proj in torch's layout, Vᵀ and V Λ. An interceptor of the attention does not see V being made."""
        with nullcontext() if torch.compiler.is_compiling() else torch._C.DisableTorchFunction():
            return _weights_of([self])[0]

    def eigenvalues(self) -> Tensor:
        """Λ as (heads, head_dim)."""
        return eigenvalues(self.psi, self.sign, self.spectrum).reshape(self.shape.heads, self.shape.head_dim)

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.distance is None else f", distance={self.distance:.3g}")

    @torch.no_grad()
    def _start(self, value: Tensor, projection: Tensor) -> None:
        value = require_finite(value.cpu().double(), f"layer {self.shape.layer}: W_V")
        projection = require_finite(projection.cpu().double(), f"layer {self.shape.layer}: W_proj")
        before = require_finite(projection @ value, f"layer {self.shape.layer}: H")
        wanted, v = torch.linalg.eigh((before + before.mT) / 2)
        order = _share_out(wanted, v, value, projection, self.shape.heads)
        wanted, v = wanted[order], v[:, order]
        if not self.shape.pretrained:
            wanted = wanted * (before.norm() / wanted.norm()).nan_to_num()
            wanted = {"free": wanted, "positive": wanted.abs(), "negative": -wanted.abs()}[self.sign]
        self.theta.copy_(BASES[self.basis].preimage(v))
        self.psi.copy_(psi_for(wanted, self.sign, self.spectrum))
        if self.shape.pretrained:
            value, projection = (made.cpu().double() for made in self.weights())
            size = float(before.norm()) or 1.0  # a layer whose H was 0 has moved by the new ‖H‖
            self.distance = float((projection @ value - before).norm()) / size

    @torch.no_grad()
    def _keep_constant(self, value: Projection, output: Projection) -> None:
        """Keep W_proj b_V: rows of A sum to one, so a layer adds it to every token whatever A is."""
        constant, bias = value.offset(), output.offset()
        if constant is None or bias is None or bias.is_meta:
            return
        before = bias.clone()
        moved = output.matrix().cpu().double() - self.weights()[1].cpu().double()
        bias.copy_(bias.cpu().double() + moved @ constant.cpu().double())
        self._biases = before, bias.clone()


def weights_together(mitigations: Sequence[Mitigation | None]) -> list[Weights | None]:
    """W_V and W_proj of every layer that has an Eigen, with bases of one kind in one batch.

    The basis of one layer is a chain of tiny products, too small for a GPU; twelve at once take hardly longer.
    """
    layers = [eigen_of(mitigation) for mitigation in mitigations]
    eigens = [layer for layer in layers if layer is not None]
    kinds = [(e.sign, e.basis, e.spectrum, e.theta.shape, e.theta.dtype, e.theta.device) for e in eigens]
    is_one_kind = eigens and all(kind == kinds[0] for kind in kinds)
    made = iter(_weights_of(eigens) if is_one_kind else [eigen.weights() for eigen in eigens])
    return [None if layer is None else next(made) for layer in layers]


def eigen_of(mitigation: Mitigation | None) -> Eigen | None:
    """The Eigen that a mitigation is, or has as a part."""
    return next((part for part in parts_of(mitigation) if isinstance(part, Eigen)), None)


def _weights_of(layers: Sequence[Eigen]) -> list[Weights]:
    """Vᵀ and V Λ of layers of one kind, in float32 or better even under autocast."""
    kind, dtype = layers[0], layers[0].theta.dtype
    theta, psi = (torch.stack([getattr(layer, name) for layer in layers]) for name in ("theta", "psi"))
    with torch.autocast(theta.device.type, enabled=False):
        if dtype != torch.float64:
            theta, psi = theta.float(), psi.float()
        v = BASES[kind.basis].map(theta)
        left = torch.linalg.inv_ex(v).inverse.mT if kind.basis == "inverse" else v
        projection = left * eigenvalues(psi, kind.sign, kind.spectrum).unsqueeze(-2)
        return list(zip(v.mT.to(dtype).unbind(), projection.to(dtype).unbind(), strict=True))


def _share_out(wanted: Tensor, v: Tensor, value: Tensor, projection: Tensor, heads: int) -> Tensor:
    """An order of the eigenpairs that gives every head those it contributed most to.

    λ = vᵀ H v is the sum of the heads' vᵀ H_h v. Large eigenvalues choose first, and full heads are skipped.
    """
    through = (value @ v) * (projection.mT @ v)  # rows: channels of the heads; columns: eigenpairs
    share = through.unflatten(0, (heads, -1)).sum(1) * wanted.sign()
    ranked = share.argsort(dim=0, descending=True, stable=True).T.tolist()
    owned: list[list[int]] = [[] for _ in range(heads)]
    room = len(wanted) // heads
    for pair in wanted.abs().argsort(descending=True, stable=True).tolist():
        owned[next(head for head in ranked[pair] if len(owned[head]) < room)].append(pair)
    return torch.tensor([pair for pairs in owned for pair in pairs])


def admissible(sign: Sign, spectrum: Spectrum) -> tuple[float, float]:
    """The closed interval that holds every λ of this kind."""
    most = math.inf if spectrum == "square" else 1.0
    return (0.0 if sign == "positive" else -most), (0.0 if sign == "negative" else most)


def eigenvalues(psi: Tensor, sign: Sign, spectrum: Spectrum) -> Tensor:
    """λ from ψ."""
    if spectrum == "clipped":
        return _Clip.apply(psi, *admissible(sign, spectrum))  # type: ignore[no-any-return, no-untyped-call]
    if sign == "free":
        return psi.tanh() if spectrum == "bounded" else psi
    size = psi.sigmoid() if spectrum == "bounded" else psi.square()
    return -size if sign == "negative" else size


def psi_for(wanted: Tensor, sign: Sign, spectrum: Spectrum) -> Tensor:
    """ψ of the admissible λ closest to the wanted ones, EDGE away from a border that has no gradient."""
    low, high = admissible(sign, spectrum)
    if spectrum == "clipped":
        return wanted.clamp(low, high)
    if sign == "free":
        return wanted.clamp(low + EDGE, high - EDGE).atanh() if spectrum == "bounded" else wanted
    size = (-wanted if sign == "negative" else wanted).clamp_min(EDGE)
    return size.clamp_max(1 - EDGE).logit() if spectrum == "bounded" else size.sqrt()


class _Clip(torch.autograd.Function):
    """A clip that ψ can come back from: outside the range, gradients that lead inwards pass."""

    @staticmethod
    def forward(ctx: Any, psi: Tensor, low: float, high: float) -> Tensor:
        ctx.save_for_backward(psi)
        ctx.range = low, high
        return psi.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ((psi,), (low, high), (gradient,)) = ctx.saved_tensors, ctx.range, gradients
        passes = ((psi >= low) | (gradient < 0)) & ((psi <= high) | (gradient > 0))
        return gradient * passes, None, None
