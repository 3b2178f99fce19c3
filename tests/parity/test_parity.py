"""The matrix of every library but timm; docs/parity.md has the commands that write the evidence of all cells."""

from parity_matrix import MatrixChecks


class TestParity(MatrixChecks):
    libraries = ("acutance.models", "transformers", "torch.nn", "hand-written")
