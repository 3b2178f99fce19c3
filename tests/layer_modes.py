"""The true dominating eigenvalues of I + Σ_h H_h⊗A_h: an oracle for `explain`, which counts by |1 + λμ|.

The spectrum of such a sum is not made of those of its parts: the count, with λ of the whole H and μ of each A_h, is
exact for one head or equal A_h, and a heuristic otherwise.
"""

import numpy as np

from acutance.explain.weights import branch

DENSE = 400  # rows of a matrix whose eigenvalues are all found


def layer_modes(site, A):
    """The largest eigenvalues by modulus: on constant tokens, where the layer is I + H, and per sample on all others.

    Tokens must not be padded. Causal attention must be short: it is so far from normal that iteration finds
    pseudo-eigenvalues.
    """
    parts = branch(site)
    H = (parts.projection @ parts.heads_value).cpu().numpy()  # (heads, dim, dim)
    tokens = A.shape[-1]
    basis = np.linalg.qr(np.column_stack([np.ones(tokens), np.eye(tokens)[:, 1:]]))[0][:, 1:]  # zero mean
    entries = basis.T @ A.dense().double().cpu().numpy() @ basis
    return _largest(H.sum(0)[None], np.ones((1, 1, 1))), np.array([_largest(H, sample) for sample in entries])


def _largest(H, A):
    """Of I + Σ_h H_h⊗A_h."""
    dim, tokens = H.shape[-1], A.shape[-1]
    if dim * tokens <= DENSE:
        layer = sum(np.kron(h, a) for h, a in zip(H, A, strict=True))
        values = 1 + np.linalg.eigvals(layer)
    else:
        from scipy.sparse.linalg import LinearOperator, eigs

        def multiply(x):
            return x + np.einsum("hnm,md,hed->ne", A, x.reshape(tokens, dim), H, optimize=True).ravel()

        start = np.random.default_rng(0).standard_normal(dim * tokens)
        values = eigs(LinearOperator((dim * tokens,) * 2, multiply, dtype=float), 1, which="LM", v0=start)[0]
    return complex(values[np.abs(values).argmax()])
