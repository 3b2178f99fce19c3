"""Eigen: a layer whose H has the spectrum you choose (Setting the Record Straight on Oversmoothing, 2401.04301)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from acutance.errors import AcutanceError, NonFiniteError, ShapeError
from acutance.mitigations import spectra
from acutance.mitigations.base import LayerShape, Mitigation, Weights, parts_of, register
from acutance.mitigations.orthogonal import BASES
from acutance.mitigations.projection import Projection

BasisName = Literal["qr", "polar", "cayley", "householder", "inverse"]


class _Running(threading.local):
    """The layer whose block is running in this thread, and its weights once they have been made."""

    layer: Eigen | None = None
    value: Tensor | None = None
    output: Tensor | None = None


_RUNNING = _Running()


@register("eigen")
class Eigen(Mitigation):
    """H = V Λ Vᵀ with the signs of Λ decided in advance: ViT⁻ and ViT⁺ (https://arxiv.org/abs/2401.04301).

    In the paper's letters W_V = V and W_proj = Λ Vᵀ, made from Θ and ψ at every forward, in any model whose attention
    has as many value heads as query heads. Columns of V are shared out among the heads in order, so the H of a head has
    its own part of Λ as its eigenvalues, and the heads' terms add up to H.

    It does not start at the identity. A trained layer starts from the *closest* admissible H (the symmetric part of its
    H, eigenvalues clipped), and `distance` tells how far that is. The constant W_proj b_V that the values' bias adds to
    every token stays: the projection's bias makes up for the new W_proj. A new layer starts from the eigenvectors of
    the symmetric part of its initial H, with eigenvalues of the sign asked for and scaled to the norm of that H.

    Args:
        sign: of the eigenvalues. Negative sharpens (ViT⁻), positive smooths (ViT⁺), free is both.
        basis: where V comes from. "qr" is the poster's; "polar" (Newton–Schulz), "cayley" and "householder" make an
            orthogonal V too; with "inverse" V is free and W_proj = Λ V⁻¹, as in the paper's later version.
        spectrum: λ from ψ. "square" is the poster's ±ψ² (free: ψ), which has no lower end: see `check_spectrum`.
            "clipped" cuts off at ±1 and 0; "bounded" is ∓σ(ψ) (free: tanh ψ) and never leaves [−1, 1].
    """

    positional = "sign"
    requires = ("nothing_between",)
    theta: nn.Parameter
    psi: nn.Parameter

    def __init__(
        self,
        sign: spectra.Sign = "negative",
        basis: BasisName = "qr",
        spectrum: spectra.Spectrum = "square",
    ) -> None:
        super().__init__()
        self.sign, self.basis, self.spectrum = sign, basis, spectrum
        for name, known in (("sign", spectra.Sign), ("basis", BasisName), ("spectrum", spectra.Spectrum)):
            if getattr(self, name) not in get_args(known):
                raise AcutanceError(f"eigen: {name} must be one of {get_args(known)}, not {getattr(self, name)!r}")
        self._biases: tuple[Tensor, Tensor] | None = None  # of its projection, before and after parametrise

    def build(self, shape: LayerShape) -> None:
        """Θ and ψ of one layer, which `parametrise` fills from the layer's own weights."""
        if shape.kv_heads != shape.heads or shape.heads * shape.head_dim != shape.dim:
            raise self._wrong_sizes(shape, f"{shape.heads} query and {shape.kv_heads} value heads of {shape.head_dim}")
        self.theta = nn.Parameter(torch.eye(shape.dim))
        self.psi = nn.Parameter(torch.ones(shape.dim))

    def parametrise(self, value: Projection, output: Projection) -> None:
        """Choose Θ and ψ by W_V and W_proj, then make these from them."""
        for projection in (value, output):
            projection.refuse_parametrisation()
        before = value.matrix(), output.matrix()
        if not before[0].shape == before[1].shape == (self._layer.dim,) * 2:
            raise self._wrong_sizes(self._layer, f"W_V {tuple(before[0].shape)} and W_proj {tuple(before[1].shape)}")
        if not before[0].is_meta:
            self._start(*before)
        if self._layer.pretrained:
            self._keep_constant(value, output)
        value.parametrise(self, self._value)
        output.parametrise(self, self._output)

    def unparametrise(self, value: Projection, output: Projection) -> None:
        """Give a trained layer back what it had, a new one what it has now."""
        for projection in (output, value):
            projection.unparametrise(keep=not self._layer.pretrained)
        self._restore_bias(output)

    def fold(self, value: Projection, output: Projection) -> None:
        """Leave W_V and W_proj as they are now, as plain weights."""
        for projection in (output, value):
            projection.unparametrise(keep=True)

    def enter(self) -> None:
        """Until `leave`, V is made once for W_V and W_proj; a graph has it before the attention, which is watched."""
        _RUNNING.layer = self
        _RUNNING.value, _RUNNING.output = self.weights() if torch.compiler.is_compiling() else (None, None)

    def leave(self) -> None:
        """Nothing outlives the block's run: the next optimiser step changes Θ."""
        if _RUNNING.layer is self:
            _RUNNING.layer = _RUNNING.value = _RUNNING.output = None

    def _value(self) -> Tensor:
        """W_V, always made where it is asked for: what checkpointing runs again must be what ran before."""
        if _RUNNING.layer is self and _RUNNING.value is not None:
            return _RUNNING.value
        value, output = self._unwatched()
        if _RUNNING.layer is self:
            _RUNNING.output = output
        return value

    def _output(self) -> Tensor:
        """W_proj, made with W_V if that was in the same run of the block."""
        learns = torch.is_grad_enabled() and (self.theta.requires_grad or self.psi.requires_grad)
        if _RUNNING.layer is self:
            output, _RUNNING.output = _RUNNING.output, None
            if output is not None and (output.requires_grad or not learns):  # re-entrant checkpointing: not W_V's
                return output
        elif learns and _is_recomputing():
            raise AcutanceError(
                f"eigen: activation checkpointing of layer {self._layer.layer} has W_proj in it but not W_V, which are "
                "made together: put it around the attention or around the whole block"
            )
        return self._unwatched()[1]

    def _unwatched(self) -> Weights:
        """Whoever intercepts the attention should not see V being made."""
        if torch.compiler.is_compiling():
            return self.weights()
        with torch._C.DisableTorchFunction():
            return self.weights()

    def weights(self) -> Weights:  # in torch's layout: Vᵀ and V Λ
        return _weights_of([self])[0]

    def eigenvalues(self) -> Tensor:
        """Λ as (heads, head_dim)."""
        flat = spectra.eigenvalues(self.psi, self.sign, self.spectrum)
        return flat.reshape(self._layer.heads, self._layer.head_dim)

    def extra_repr(self) -> str:
        moved = "" if self.distance is None else f", distance={self.distance:.3g}"
        return super().extra_repr() + moved

    @property
    def _layer(self) -> LayerShape:
        assert self.shape is not None, "built by for_layer"
        return self.shape

    def _wrong_sizes(self, shape: LayerShape, sizes: str) -> ShapeError:
        return ShapeError(
            f"eigen: layer {shape.layer} has {sizes} for {shape.dim} channels: V Λ Vᵀ needs heads · head_dim = dim and "
            "a value head for every query head. Leave such layers out with mitigate(..., layers=[...])"
        )

    @torch.no_grad()
    def _start(self, value: Tensor, projection: Tensor) -> None:
        before = _double(projection) @ _double(value)
        if not before.isfinite().all():
            raise NonFiniteError(f"eigen: W_V or W_proj of layer {self._layer.layer} holds NaN or infinite entries")
        wanted, v = torch.linalg.eigh((before + before.mT) / 2)
        order = _share_out(wanted, v, _double(value), _double(projection), self._layer.heads)
        wanted, v = wanted[order], v[:, order]
        if not self._layer.pretrained:
            wanted = wanted * (before.norm() / wanted.norm()).nan_to_num()
            signs = {"free": wanted, "positive": wanted.abs(), "negative": -wanted.abs()}
            wanted = signs[self.sign]
        self.theta.copy_(v if self.basis == "inverse" else BASES[self.basis].preimage(v))
        self.psi.copy_(spectra.psi_for(wanted, self.sign, self.spectrum))
        if self._layer.pretrained:
            value, projection = self.weights()
            after = _double(projection) @ _double(value)
            size = float(before.norm()) or 1.0  # a layer whose H was 0 has moved by the new ‖H‖
            self.distance = float((after - before).norm()) / size

    @torch.no_grad()
    def _keep_constant(self, value: Projection, output: Projection) -> None:
        """Rows of A sum to one, so a layer adds W_proj b_V to every token whatever A is: it must not move."""
        constant, bias = value.offset(), output.offset()
        if constant is None or bias is None or bias.is_meta:
            return
        before = bias.clone()
        moved = _double(output.matrix()) - _double(self.weights()[1])
        bias.copy_(_double(bias) + moved @ _double(constant))
        self._biases = before, bias.clone()

    @torch.no_grad()
    def _restore_bias(self, output: Projection) -> None:
        """Bit by bit if nothing happened to it; what it has learnt since stays."""
        bias = output.offset()
        if self._biases is None or bias is None:
            return
        before, after = (old.to(bias) for old in self._biases)
        bias.copy_(before if torch.equal(bias, after) else bias + (before - after))
        self._biases = None


def weights_together(mitigations: Sequence[Mitigation]) -> list[Weights | None]:
    """`weights()` of every layer; the bases of an Eigen in many layers are computed in one batch.

    A basis of one layer is a chain of tiny products that keeps a GPU waiting; twelve at once take hardly longer.
    """
    layers = [eigen_of(mitigation) for mitigation in mitigations]
    eigens = [layer for layer in layers if layer is not None]
    if len(eigens) < 2 or any(_kind(layer) != _kind(eigens[0]) for layer in eigens):
        return [mitigation.weights() for mitigation in mitigations]
    made = iter(_weights_of(eigens))
    return [mitigations[i].weights() if layer is None else next(made) for i, layer in enumerate(layers)]


def eigen_of(mitigation: Mitigation | None) -> Eigen | None:
    """The Eigen that a mitigation is, or has as a part."""
    parts = [] if mitigation is None else parts_of(mitigation)
    return next((part for part in parts if isinstance(part, Eigen)), None)


def _kind(eigen: Eigen) -> tuple[object, ...]:
    """What layers must have in common to be computed together."""
    theta = eigen.theta
    return eigen.sign, eigen.basis, eigen.spectrum, theta.shape, theta.dtype, theta.device


def _weights_of(layers: Sequence[Eigen]) -> list[Weights]:
    """Vᵀ and V Λ of layers of one kind, V made once for both, in float32 or better whatever autocast says."""
    kind, dtype = layers[0], layers[0].theta.dtype
    theta, psi = (torch.stack([getattr(layer, name) for layer in layers]) for name in ("theta", "psi"))
    with torch.autocast(theta.device.type, enabled=False):
        if dtype != torch.float64:
            theta, psi = theta.float(), psi.float()
        if kind.basis == "inverse":
            v, left = theta, torch.linalg.inv_ex(theta).inverse.mT
        else:
            v = left = BASES[kind.basis].map(theta)
        projection = left * spectra.eigenvalues(psi, kind.sign, kind.spectrum).unsqueeze(-2)
        return list(zip(v.mT.to(dtype).unbind(), projection.to(dtype).unbind(), strict=True))


def _share_out(wanted: Tensor, v: Tensor, value: Tensor, projection: Tensor, heads: int) -> Tensor:
    """An order of the eigenpairs that gives every head those it contributed most to.

    λ = vᵀ H v is the sum of the heads' vᵀ H_h v. Large eigenvalues choose first; a head that is full is passed over.
    """
    through = (value @ v) * (projection.mT @ v)  # rows: channels of the heads; columns: eigenpairs
    share = through.unflatten(0, (heads, -1)).sum(1) * wanted.sign()
    ranked = share.argsort(dim=0, descending=True, stable=True).T.tolist()
    owned: list[list[int]] = [[] for _ in range(heads)]
    room = len(wanted) // heads
    for pair in wanted.abs().argsort(descending=True, stable=True).tolist():
        owned[next(head for head in ranked[pair] if len(owned[head]) < room)].append(pair)
    return torch.tensor([pair for pairs in owned for pair in pairs])


def _is_recomputing() -> bool:
    """Whether activation checkpointing runs a part of the forward pass again, within the backward pass."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _double(weight: Tensor) -> Tensor:
    return weight.detach().to("cpu", torch.float64)
