"""The bases and spectra of Eigen, by other formulas than ours."""

import torch


def basis_of(basis, theta):
    identity = torch.eye(theta.shape[-1], dtype=theta.dtype)
    if basis == "qr":
        lower = torch.linalg.cholesky(theta.mT @ theta)  # ΘᵀΘ = RᵀR, and V = ΘR⁻¹
        return torch.linalg.solve_triangular(lower, theta.mT, upper=False).mT
    if basis == "polar":
        u, _, vh = torch.linalg.svd(theta)
        return u @ vh
    if basis == "cayley":
        skew = (theta - theta.mT) / 2
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


def shake(model, amount):
    """Move Θ and ψ on, as training would."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".mitigation." in name:
            parameter.data += amount * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model
