"""The bases and spectra of Eigen, by other formulas than ours."""

import torch


def basis_of(basis, theta):
    identity = torch.eye(len(theta), dtype=theta.dtype)
    if basis == "qr":
        lower = torch.linalg.cholesky(theta.T @ theta)  # ΘᵀΘ = RᵀR, and V = ΘR⁻¹
        return torch.linalg.solve_triangular(lower, theta.T, upper=False).T
    if basis == "polar":
        u, _, vh = torch.linalg.svd(theta)
        return u @ vh
    if basis == "cayley":
        skew = (theta - theta.T) / 2
        return torch.linalg.solve(identity + skew, identity - skew)
    if basis == "householder":
        v = identity
        for j in range(len(theta)):
            reflector = torch.cat([theta.new_zeros(j), theta.new_ones(1), theta[j + 1 :, j]])
            v = v @ (identity - 2 * torch.outer(reflector, reflector) / reflector.dot(reflector))
        return v
    return theta


def spectrum_of(sign, spectrum, psi):
    if spectrum == "clipped":
        return psi.clamp(0.0 if sign == "positive" else -1.0, 0.0 if sign == "negative" else 1.0)
    if sign == "free":
        return torch.tanh(psi) if spectrum == "bounded" else psi
    size = 1 / (1 + (-psi).exp()) if spectrum == "bounded" else psi * psi
    return size if sign == "positive" else -size
