"""The matrix of every library but timm, whose tests have an environment of their own.

docs/parity.md has the commands that write the evidence of all cells, and its tables.
"""

from parity_matrix import MatrixChecks


class TestParity(MatrixChecks):
    libraries = ("acutance.models", "transformers", "torch.nn", "hand-written")
