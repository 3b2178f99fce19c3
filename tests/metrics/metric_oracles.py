"""The metrics once more, in NumPy float64, from their definitions: explicit sums and no shared code."""

from math import exp, inf, log, sqrt

import numpy as np


def token_cosine(x):
    n = len(x)
    if n < 2:
        return 1.0
    total = 0.0
    for i in range(n):
        for j in range(n):
            lengths = sqrt(x[i] @ x[i]) * sqrt(x[j] @ x[j])
            if i != j and lengths > 0:
                total += x[i] @ x[j] / lengths
    return total / (n * (n - 1))


def _frequencies(x):
    averaging = np.full((len(x), len(x)), 1 / len(x))
    low = averaging @ x
    return low, x - low


def _quotient(a, b):
    return a / b if b > 0 else (inf if a > 0 else 0.0)


def hfc_lfc_spectral(x):
    low, high = _frequencies(x)
    return _quotient(np.linalg.norm(high, 2), np.linalg.norm(low, 2))


def hfc_lfc_frobenius(x):
    low, high = _frequencies(x)
    return _quotient(sqrt(np.sum(high**2)), sqrt(np.sum(low**2)))


def rank_residual(x):
    _, high = _frequencies(x)
    return sqrt(np.sum(high**2)) / sqrt(np.sum(x**2))


def singular_ratio(x):
    sigma = np.linalg.svd(x, compute_uv=False)
    return sigma[1] / sigma[0] if len(sigma) > 1 else 0.0


def effective_rank(x):
    sigma = np.linalg.svd(x, compute_uv=False)
    shares = [s / sum(sigma) for s in sigma if s > 1e-12 * sigma[0]]
    return exp(-sum(p * log(p) for p in shares))


def stable_rank(x):
    return np.sum(x**2) / np.linalg.svd(x, compute_uv=False)[0] ** 2


def norm_spread(x):
    norms = [sqrt(token @ token) for token in x]
    mean = sum(norms) / len(norms)
    return sqrt(sum((norm - mean) ** 2 for norm in norms) / len(norms)) / mean


def log_kernel(q, k, kernel, scale):
    """log k(q, k) of one query and one key."""
    if kernel in ("softmax", "symmetric"):
        return scale * (q @ k)
    if kernel == "rbf":
        return -scale * np.sum((q - k) ** 2) / 2
    if kernel == "linear":

        def phi(x):
            return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))

        return log(phi(q) @ phi(k))
    return 2 * log(abs(1 + scale * (q @ k)))


def log_kernel_matrix(q, k, *, kernel="softmax", scale=None, mask=None, causal=False):
    """log of the raw kernel (B, H, N, M), −inf where masked; the mask (bool or bias) broadcasts."""
    batch, heads, queries, width = q.shape
    keys, group = k.shape[2], heads // k.shape[1]
    scale = 1 / sqrt(width) if scale is None else scale
    logs = np.zeros((batch, heads, queries, keys))
    if mask is not None:
        mask = np.broadcast_to(mask, logs.shape)
    for b, h, i, j in np.ndindex(logs.shape):
        query = k[b, h // group, i] if kernel == "symmetric" else q[b, h, i]
        logs[b, h, i, j] = log_kernel(query, k[b, h // group, j], kernel, scale)
        if causal and j > i + keys - queries:
            logs[b, h, i, j] = -inf
        elif mask is not None:
            logs[b, h, i, j] += mask[b, h, i, j] if mask.dtype != bool else (0 if mask[b, h, i, j] else -inf)
    return logs


def normalised(logs):
    """Rows that sum to one; a fully masked row is zero."""
    weights = np.zeros_like(logs)
    for index in np.ndindex(logs.shape[:-1]):
        if logs[index].max() > -inf:
            row = np.exp(logs[index] - logs[index].max())
            weights[index] = row / row.sum()
    return weights


def nonlocal_energy(weights, u):
    """½ Σ_ij A_ij ‖u_i − u_j‖² of one head."""
    n = len(u)
    return sum(weights[i, j] * np.sum((u[i] - u[j]) ** 2) for i in range(n) for j in range(n)) / 2


def log_nonlocal_energy_raw(logs, u):
    """log of ½ Σ_ij k_ij ‖u_i − u_j‖² of one head, safe for any size of the logs."""
    n = len(u)
    terms = []
    for i in range(n):
        for j in range(n):
            square = np.sum((u[i] - u[j]) ** 2)
            if square > 0 and logs[i, j] > -inf:
                terms.append(logs[i, j] + log(square / 2))
    return max(terms) + log(sum(exp(t - max(terms)) for t in terms)) if terms else -inf


def gradient_alignment(logs, symmetric_logs, v, rows):
    """Mean over rows that see a key of the cosine of the two gradients Σ_j (v_i − v_j) K_ij, of one head."""
    cosines = []
    for i in rows:
        if logs[i].max() == -inf:
            continue
        a = sum((v[i] - v[j]) * exp(logs[i, j]) for j in range(len(v)))
        b = sum((v[i] - v[j]) * exp(symmetric_logs[i, j]) for j in range(len(v)))
        lengths = sqrt(a @ a) * sqrt(b @ b)
        cosines.append(a @ b / lengths if lengths > 0 else 0.0)
    return sum(cosines) / len(cosines) if cosines else 0.0


def attention_entropy(weights, rows):
    """Mean entropy of the rows of one head that see a key."""
    entropies = [-sum(p * log(p) for p in weights[i] if p > 0) for i in rows if weights[i].sum() > 0]
    return sum(entropies) / len(entropies) if entropies else 0.0


def frobenius_cosine(a, b):
    inner = sum(a[i, j] * b[i, j] for i, j in np.ndindex(a.shape))
    lengths = sqrt(np.sum(a**2)) * sqrt(np.sum(b**2))
    return inner / lengths if lengths > 0 else 0.0
