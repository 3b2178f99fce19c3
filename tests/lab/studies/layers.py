import torch

from attention.operator_cases import normal

TOKENS, WIDTH = 7, 5


def centred_branch(eigenvalues, seed=1):
    """H with these eigenvalues on centred tokens and a random part on the channels' mean; and the eigenvectors."""
    mean = torch.ones(WIDTH, 1, dtype=torch.float64)
    vectors = torch.linalg.qr(torch.cat([mean, normal(WIDTH, WIDTH - 1, seed=seed)], dim=1)).Q[:, 1:]
    H = (vectors * torch.tensor(eigenvalues, dtype=torch.float64)) @ vectors.mT
    return H + 0.3 * normal(WIDTH, 1, seed=seed + 1) @ mean.mT + 0.3 * mean @ normal(1, WIDTH, seed=seed + 2), vectors
