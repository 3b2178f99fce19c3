"""The attention operator: A acting on values, without ever forming the matrix."""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from acutance.attention import products, spectra
from acutance.attention.kernels import attention_sums
from acutance.attention.products import KERNELS, repeat_heads
from acutance.errors import AcutanceError, ShapeError

HIDDEN = -1e4  # a bias as low as that hides a key: libraries write −10000, the lowest number of a dtype, or −∞
OPTIONS = ("mask", "causal", "scale", "softcap", "sink", "kernel")


@dataclass(eq=False, repr=False)
class AttentionOperator:
    """Self-attention as a linear operator A on values: row i holds what token i takes from every token.

    Args:
        q: queries (batch, heads, queries, width).
        k: keys (batch, key heads, keys, width). Query head h uses key head h // (heads / key heads).
        mask: bool, True where a key takes part: (batch, keys), or anything that broadcasts to (batch, heads, queries,
            keys). Or a float bias that broadcasts likewise and is added to the logits (exponential kernels only).
        causal: row i sees keys up to i + keys − queries, so the last query sees every key.
        scale: of the dot product, 1/√width by default; the linear kernel has none.
        kernel: softmax exp(s q·k), symmetric (softmax with q := k), rbf exp(−s‖q−k‖²/2), linear φ(q)·φ(k) with
            φ = elu + 1, polynomial (1 + s q·k)².
        softcap: logits s become c·tanh(s/c), as in Gemma 2 (exponential kernels only).
        sink: one logit per head (heads,) that takes part in the softmax and has no value, as in gpt-oss.

    Rows sum to one. A fully masked row is zero (logsumexp −∞), and a sink scales row i by `row_scale`. Products have
    the wider dtype of A and their operand; entries, sums and spectra are float32 or better.
    """

    q: Tensor
    k: Tensor
    _: KW_ONLY
    mask: Tensor | None = None
    causal: bool = False
    scale: Any = None
    kernel: str = "softmax"
    softcap: float | None = None
    sink: Tensor | None = None
    key_heads: int = 0  # of values that A takes beside one per head; by default those of k
    has_keys: bool = True  # False where only logits are known

    def __post_init__(self) -> None:
        q, k, kernel, sink = self.q, self.k, self.kernel, self.sink
        both = f"q {tuple(q.shape)}, k {tuple(k.shape)}"
        if q.ndim != 4 or k.ndim != 4 or 0 in (*q.shape, *k.shape):
            raise ShapeError(f"q and k are (batch, heads, tokens, width), at least one of each; got {both}")
        for name, x in (("q", q), ("k", k)):
            if not x.is_floating_point():
                raise AcutanceError(f"{name} is {x.dtype}; queries and keys are floating point, give {name}.float()")
        if q.size(0) != k.size(0) or q.size(-1) != k.size(-1) or q.size(1) % k.size(1):
            raise ShapeError(f"q and k differ in batch or width, or q's heads are no multiple of k's: {both}")
        _check_devices(q, k=k, mask=self.mask, sink=sink)
        if kernel not in KERNELS:
            raise AcutanceError(f"unknown kernel {kernel!r}; the known ones are {', '.join(sorted(KERNELS))}")
        self.is_exponential = KERNELS[kernel].channels is not None  # an exponential of logits: softmax, symmetric, rbf
        if self.softcap is not None and not (self.is_exponential and self.softcap > 0):
            raise AcutanceError(f"a softcap is positive and for exponential kernels; got {self.softcap} for {kernel!r}")
        self.scale = q.size(-1) ** -0.5 if self.scale is None else self.scale
        self.heads, self.key_heads = q.size(1), self.key_heads or k.size(1)
        if KERNELS[kernel].queries_are_keys:
            if q.size(-2) != k.size(-2):
                raise ShapeError(f"kernel {kernel!r} needs as many queries as keys; {both}")
            self.q = self.k = q = k = repeat_heads(k, self.heads)
        self.dtype, self.device = q.dtype, q.device
        self.shape: tuple[int, int, int, int] = (q.size(0), self.heads, q.size(-2), k.size(-2))
        self.mask4 = None if self.mask is None else products.as_four_axes(self.mask, self.shape, self.is_exponential)
        if sink is not None and (sink.shape != (self.heads,) or not self.is_exponential):
            given = f"got {tuple(sink.shape)}, {kernel!r}"
            raise ShapeError(f"a sink is one logit per head ({self.heads},) of an exponential kernel; {given}")
        self.remembered: tuple[tuple[int, ...], Tensor] | None = None  # by `attention_sums`

    @classmethod
    def from_logits(cls, logits: Tensor, sink: Tensor | None = None, key_heads: int = 0) -> "AttentionOperator":
        """The operator softmax(logits), of a model that wrote its attention out: (batch, heads, queries, keys).

        The logits are the queries and unit vectors the keys, so q kᵀ is the logits. What is hidden becomes a mask.
        Memory is that of the matrix, which the model has formed already.
        """
        batch, heads, _, keys = logits.shape
        visible = is_visible(logits)
        units = torch.eye(keys, dtype=logits.dtype, device=logits.device).expand(batch, heads, keys, keys)
        q = logits.masked_fill(~visible, 0)
        return cls(q, units, mask=visible, scale=1.0, sink=sink, key_heads=key_heads, has_keys=False)

    def __repr__(self) -> str:
        details = f"shape={self.shape}, kernel={self.kernel!r}, causal={self.causal}, scale={self.scale:.4g}"
        details += "" if self.softcap is None else f", softcap={self.softcap:g}"
        details += "" if self.sink is None else ", with a sink"
        details += "" if self.mask is None else f", mask={self.mask.dtype} {tuple(self.mask.shape)}"
        return f"{type(self).__name__}({details}, dtype={self.dtype}, device={self.device})"

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """What it is made of: queries, keys, mask and sink."""
        return self.q, self.k, self.mask, self.sink

    @property
    def masks_keys_only(self) -> bool:
        """Whether the mask, if any, is the same for every query (causality aside)."""
        return self.mask4 is None or self.mask4.size(-2) == 1

    @property
    def is_reversible(self) -> bool:
        """Whether A is a symmetric kernel divided by its row sums: q is k, and only keys are masked."""
        return self.q is self.k and self.masks_keys_only and not self.causal and self.sink is None

    @property
    def is_associative(self) -> bool:
        """Whether A is a product of features: the linear kernel without causality, and only keys are masked."""
        return self.kernel == "linear" and not self.causal and self.masks_keys_only

    @cached_property
    def is_triangular(self) -> bool:
        """Whether no token takes anything from a later one: A is causal, or its entries show it, whatever the mask."""
        if self.shape[-2] != self.shape[-1]:
            return False
        if self.causal or self.mask4 is None:
            return self.causal
        with torch.no_grad():
            return not any(weights.triu(rows.start + 1).any() for rows, weights in self.tiles())

    @property
    def T(self) -> "TransposedOperator":  # noqa: N802
        """The transpose: `A.T @ y` is Aᵀy."""
        return TransposedOperator(self)

    def __matmul__(self, x: Tensor) -> Tensor:
        return self.apply(x)

    def apply(self, x: Tensor, dropout: float = 0.0) -> Tensor:
        """A x for x (batch, heads or key heads, keys, channels); dropout acts on the attention weights."""
        self._check_operand("x", x, tokens=self.shape[-1], heads={self.heads, self.key_heads})
        A, x = self._promoted(x)
        if products.can_fuse(A, x, dropout):
            return products.fused_apply(A, x, dropout)
        if self.is_associative and dropout == 0.0:
            return products.associative_apply(A, x)
        return products.Tiles(A).apply(x, dropout)

    def apply_transpose(self, y: Tensor) -> Tensor:
        """Aᵀ y for y (batch, heads, queries, channels)."""
        self._check_operand("y", y, tokens=self.shape[-2], heads={self.heads})
        A, y = self._promoted(y)
        if A.is_associative:
            return products.associative_apply(A, y, transposed=True)
        by_backward = products.can_fuse(A, y) and not products.needs_grad(*A.tensors, y)
        return products.fused_transpose(A, y) if by_backward else products.Tiles(A).apply_transpose(y)

    def logsumexp(self) -> Tensor:
        """log Σ_j kernel(i, j) over the keys of every row (batch, heads, queries); a sink is not one of them."""
        if attention_sums.is_available(self):
            return attention_sums.row_sums(self).log_sums
        return products.Tiles(self).logsumexp()

    @property
    def row_scale(self) -> Tensor:
        """σ(logsumexp − sink) (batch, heads, queries, 1), to which the rows sum; ones without a sink."""
        sums = self.logsumexp().unsqueeze(-1)
        return torch.ones_like(sums) if self.sink is None else products.beside_sink(self.sink, sums)

    def without_sink(self) -> "AttentionOperator":
        """The operator whose rows sum to one: every row divided by its `row_scale`."""
        return self if self.sink is None else self.replace(sink=None)

    def require_row_sums_of_one(self, what: str) -> None:
        """Refuse what is only defined for rows that sum to one."""
        if self.sink is not None:
            raise AcutanceError(f"{what} needs rows that sum to one, and this A has a sink; use A.without_sink()")

    def require_weights(self, what: str) -> None:
        """Refuse what is not defined for entries of both signs; those of a softmax have one."""

    def dense(self) -> Tensor:
        """The whole matrix (batch, heads, queries, keys): for tests and few tokens."""
        return torch.cat([weights for _, weights in self.tiles()], dim=-2)

    def tiles(self, rows: int | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Blocks of rows as (slice, weights (batch, heads, rows, keys)): memory stays linear in tokens."""
        return iter(products.Tiles(self, rows))

    def diagonal(self) -> Tensor:
        """The entries A_ii (batch, heads, tokens): how much each token keeps of itself."""
        self._check_square("the diagonal")
        return products.Tiles(self).diagonal()

    @torch.no_grad()
    def eigenvalues(self, k: int | None = None) -> Tensor:
        """The k eigenvalues of largest magnitude, or all, complex (batch, heads, k), by decreasing magnitude.

        Exact for a triangular A. Otherwise from the matrix up to 512 tokens and by Arnoldi iteration above, with a
        warning where that has not converged.
        """
        self._check_square("eigenvalues")
        tokens = self.shape[-1]
        if k is not None and not 1 <= k <= tokens:
            raise AcutanceError(f"k = {k} eigenvalues of an operator on {tokens} tokens; give 1 <= k <= {tokens}")

        def largest(values: Tensor) -> Tensor:  # of a conjugate pair the positive imaginary part comes first
            by_phase = values.imag.argsort(dim=-1, descending=True)
            by_size = values.abs().gather(-1, by_phase).argsort(dim=-1, descending=True, stable=True)
            return by_phase.gather(-1, by_size)[..., :k]

        return spectra.eigenvalues(self, largest, k or tokens)

    @torch.no_grad()
    def extreme_eigenvalues(self) -> tuple[Tensor, Tensor]:
        """The eigenvalues μ_max and μ_min of largest and smallest real part, complex (batch, heads) each."""
        self._check_square("eigenvalues")
        ends = spectra.eigenvalues(self, lambda x: torch.stack([x.real.argmax(-1), x.real.argmin(-1)], -1), 2)
        return ends[..., 0], ends[..., 1]

    @torch.no_grad()
    def stationary(self) -> Tensor:
        """The distribution π with πᵀA = πᵀ (batch, heads, tokens)."""
        self._check_square("a stationary distribution")
        self.require_row_sums_of_one("a stationary distribution")
        return spectra.stationary(self)

    def symmetrised(self) -> "AttentionOperator":
        """The operator with q := k and everything else the same."""
        if not self.has_keys:
            raise AcutanceError("the symmetric kernel needs the keys; with logits alone, use metrics that need A alone")
        k = repeat_heads(self.k, self.heads)
        return self.replace(q=k, k=k, kernel="symmetric" if self.kernel == "softmax" else self.kernel)

    def to(self, dtype: torch.dtype) -> "AttentionOperator":
        """The operator computed in this floating-point dtype, itself if it is."""
        if dtype == self.q.dtype == self.k.dtype:
            return self
        k = self.k.to(dtype)
        q = k if self.q is self.k else self.q.to(dtype)
        return self.replace(q=q, k=k)  # what uses mask and sink converts them

    def replace(self, **changes: Any) -> "AttentionOperator":
        given = {name: getattr(self, name) for name in ("q", "k", *OPTIONS, "key_heads", "has_keys")}
        return AttentionOperator(**{**given, **changes})

    def _promoted(self, x: Tensor) -> "tuple[AttentionOperator, Tensor]":
        """Operator and operand in one dtype, the wider of the two; autocast chooses its own."""
        if x.dtype == self.q.dtype == self.k.dtype or torch.is_autocast_enabled(x.device.type):
            return self, x
        dtype = torch.promote_types(torch.promote_types(self.q.dtype, self.k.dtype), x.dtype)
        return self.to(dtype), x.to(dtype)

    def _check_square(self, what: str) -> None:
        if self.shape[-2] != self.shape[-1]:
            raise ShapeError(f"{what} of A needs as many queries as keys; (batch, heads, queries, keys) = {self.shape}")

    def _check_operand(self, name: str, x: Tensor, *, tokens: int, heads: set[int]) -> None:
        if x.ndim != 4 or x.size(0) != self.shape[0] or x.size(1) not in heads or x.size(-2) != tokens:
            wanted = f"({self.shape[0]}, {' or '.join(map(str, sorted(heads)))}, {tokens}, any)"
            raise ShapeError(f"{name} {tuple(x.shape)} does not fit A {self.shape}: expected (B, H, N, C) = {wanted}")
        _check_devices(self.q, **{name: x})


class TransposedOperator:
    """Aᵀ, which is applied to y (batch, heads, queries, channels)."""

    def __init__(self, operator: AttentionOperator) -> None:
        batch, heads, queries, keys = operator.shape
        self.T, self.shape = operator, (batch, heads, keys, queries)

    def __matmul__(self, y: Tensor) -> Tensor:
        return self.T.apply_transpose(y)


def is_visible(logits: Tensor) -> Tensor:
    """Where a logit is not −∞, nor as far below the largest of its row as a hidden one is; a NaN is visible."""
    return ~(logits - logits.amax(-1, keepdim=True) <= HIDDEN / 2) & (logits != -torch.inf)


def _check_devices(q: Tensor, **others: Tensor | None) -> None:
    for name, tensor in others.items():
        if tensor is not None and tensor.device != q.device:
            raise AcutanceError(f"{name} is on {tensor.device}, the queries on {q.device}; move one of them")
