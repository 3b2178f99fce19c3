"""The matrix of a linear recurrence, such as Mamba's or the gated delta rule's, without ever forming it."""

import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from acutance.attention import products
from acutance.attention.operator import AttentionOperator, _check_devices
from acutance.attention.products import accumulation_dtype, row_blocks
from acutance.errors import ShapeError, SignedRowsError

LONGEST_CHUNK = 64  # tokens: within a chunk products cost its square, between chunks its length


@dataclass(eq=False, repr=False)
class ScanOperator(AttentionOperator):
    """A linear recurrence as an operator A on values: lower triangular, and its entries have both signs.

    Every head has a state h (states, channels) that fades, is written to with the strength w, and is read:

        h_i = diag(exp f_i) h_{i−1} + w_i k_i x_iᵀ,    (A x)_i = q_iᵀ h_i,
        A_ij = w_j Σ_s q_is k_js exp(f_{j+1,s} + … + f_{i,s})    for j ≤ i.

    This is the selective scan of Mamba, one head per channel (arXiv 2403.01590), and Mamba-2's (arXiv 2405.21060). A
    delta rule first erases what its key finds: h_i = (I − w_i k_i k_iᵀ) diag(exp f_i) h_{i−1} + w_i k_i x_iᵀ. Then
    A = G (I + M)⁻¹ diag(w), with G the matrix above for w = 1, and M_ij = w_i Σ_s k_is k_js exp(…) for j < i (arXiv
    2412.06464).

    Args:
        q: what tokens read by (batch, heads, tokens, states).
        k: what they write by, likewise.
        write: w (batch, heads, tokens, 1).
        decay: f ≤ 0 (batch, heads, tokens, states or 1).
        rates: multiply f (heads, states or 1), where what differs between states does not depend on the tokens.
        erases: whether this is a delta rule.
    """

    _: KW_ONLY
    write: Tensor
    decay: Tensor
    rates: Tensor | None = None
    erases: bool = False
    causal: bool = True
    scale: Any = 1.0
    kernel: str = "scan"

    def __post_init__(self) -> None:
        q, one = self.q, (*self.q.shape[:3], 1)
        fits = q.ndim == 4 and 0 not in q.shape and self.k.shape == q.shape and self.write.shape == one
        fits = fits and self.decay.shape in (one, q.shape)
        if not fits or (self.rates is not None and self.rates.shape not in {(q.shape[1], n) for n in (1, q.shape[3])}):
            given = ", ".join(f"{name} {tuple(x.shape)}" for name, x in self.parts.items())
            raise ShapeError(f"a scan takes q and k (batch, heads, tokens, states), write and decay alike; got {given}")
        _check_devices(**self.parts)
        self.heads = self.key_heads = q.shape[1]
        self.shape = (*q.shape[:3], q.shape[2])
        self.dtype, self.device, self.mask4, self.is_exponential = q.dtype, q.device, None, False

    @property
    def parts(self) -> dict[str, Tensor]:
        """The tensors it is made of, by name."""
        found = {"q": self.q, "k": self.k, "write": self.write, "decay": self.decay, "rates": self.rates}
        return {name: x for name, x in found.items() if x is not None}

    def replace(self, **changes: Any) -> "ScanOperator":
        return replace(self, **changes)

    def to(self, dtype: torch.dtype) -> "ScanOperator":
        return self.replace(**{name: x.to(dtype) for name, x in self.parts.items()})

    def apply(self, x: Tensor, dropout: float = 0.0) -> Tensor:
        """A x for x (batch, heads, tokens, channels); there are no attention weights that dropout could act on."""
        A, values, state = self._start("x", x)
        return A._run(values, state, slice(0, A.shape[-1]))[0].to(torch.promote_types(x.dtype, self.dtype))

    def apply_transpose(self, y: Tensor) -> Tensor:
        """Aᵀ y, by the recurrence backwards."""
        A, values, state = self._start("y", y)
        parts: list[Tensor] = []
        with torch.autocast(A.device.type, enabled=False):
            for rows in reversed(A._chunks(slice(0, A.shape[-1]))):
                chunk, given = A._chunk(rows), values[..., rows, :]
                news = chunk.seen.mT @ given + chunk.leaves @ state
                state = chunk.reads.mT @ given + chunk.fades * state
                if chunk.system is not None:
                    news = solve_triangular(chunk.system.mT, news, upper=True, unitriangular=True)
                    state = state - chunk.erased.mT @ news
                parts.append(chunk.write * news)
        return torch.cat(parts[::-1], dim=-2).to(torch.promote_types(y.dtype, self.dtype))

    def tiles(self, rows: int | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Blocks of rows as (slice, entries (batch, heads, rows, tokens)), by the scan of unit vectors."""
        units = torch.eye(self.shape[-1], dtype=self.dtype, device=self.device).expand(*self.shape[:2], -1, -1)
        A, units, state = self._start("x", units)
        for block in row_blocks(A, rows):
            entries, state = A._run(units[..., block, :], state, block)
            yield block, entries

    def diagonal(self) -> Tensor:
        """The entries A_ii = w_i q_i·k_i (batch, heads, tokens), which are the eigenvalues."""
        A = self.to(accumulation_dtype(*self.parts.values()))
        return (A.q * A.k).sum(-1) * A.write.squeeze(-1)

    def require_weights(self, what: str) -> NoReturn:
        signs = f"{what} needs rows of weights that sum to one, and those of a scan have both signs"
        raise SignedRowsError(f"{signs}: read attention_cosine, head_cosine, A.diagonal() or A.dense()")

    def _refuse(self) -> NoReturn:
        self.require_weights("this")

    logsumexp = without_sink = symmetrised = _refuse
    require_row_sums_of_one = require_weights

    def _start(self, name: str, x: Tensor) -> "tuple[ScanOperator, Tensor, Tensor]":
        """Operator, operand and an empty state in float32 or better."""
        self._check_operand(name, x, tokens=self.shape[-1], heads={self.heads})
        dtype = accumulation_dtype(x, *self.parts.values())
        return self.to(dtype), x.to(dtype), x.new_zeros(*x.shape[:2], self.q.shape[-1], x.shape[-1], dtype=dtype)

    def _run(self, x: Tensor, state: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """(A x) of some rows, given their x and the state before them, and the state behind them."""
        outputs = []
        with torch.autocast(self.device.type, enabled=False):
            for inside in self._chunks(rows):
                chunk = self._chunk(inside)
                news = chunk.write * x[..., inside.start - rows.start : inside.stop - rows.start, :]
                if chunk.system is not None:
                    news = news - chunk.erased @ state
                    news = solve_triangular(chunk.system, news, upper=False, unitriangular=True)
                outputs.append(chunk.reads @ state + chunk.seen @ news)
                state = chunk.fades * state + chunk.leaves.mT @ news
        return torch.cat(outputs, dim=-2), state

    def _chunks(self, rows: slice) -> list[slice]:
        """The chunks that some rows consist of. Their matrices of pairs fit into a tile."""
        fading = 1 if self.rates is None and self.decay.shape[-1] == 1 else self.q.shape[-1]
        tile = products.CPU_TILE if self.device.type == "cpu" else products.GPU_TILE
        length = min(LONGEST_CHUNK, max(1, math.isqrt(tile // (self.shape[0] * self.heads * fading))))
        return [slice(start, min(start + length, rows.stop)) for start in range(rows.start, rows.stop, length)]

    def _chunk(self, rows: slice) -> "_Chunk":
        q, k, write, decay = (x[..., rows, :] for x in (self.q, self.k, self.write, self.decay))
        fallen = (decay if self.rates is None else decay * self.rates[:, None]).cumsum(-2)  # since the chunk began
        later = torch.ones(2 * [q.shape[-2]], dtype=torch.bool, device=q.device).triu(1)
        between = fallen.unsqueeze(-2) - fallen.unsqueeze(-3)  # from j to i (…, i, j, states or 1)
        between = between.masked_fill(later[..., None], -torch.inf).exp()

        def pairs(left: Tensor) -> Tensor:
            if between.shape[-1] == 1:
                return (left @ k.mT) * between.squeeze(-1)
            return (left.unsqueeze(-2) * k.unsqueeze(-3) * between).sum(-1)

        end, kept = fallen[..., -1:, :], fallen.exp()
        system, erased = (write * pairs(k), write * k * kept) if self.erases else (None, k)
        return _Chunk(write, q * kept, pairs(q), k * (end - fallen).exp(), end.exp().mT, system, erased)


class _Chunk(NamedTuple):
    """How some tokens in a row act on the state before them and on one another; (…, tokens, states) unless said."""

    write: Tensor  # (…, tokens, 1)
    reads: Tensor  # of the state before
    seen: Tensor  # (…, tokens, tokens): what they read of what the others write
    leaves: Tensor  # what is left at the end of what they write
    fades: Tensor  # (…, states or 1, 1): of the state before, what is left at the end
    system: Tensor | None  # (…, tokens, tokens): what they erase of what the others write
    erased: Tensor  # what they erase of the state before
