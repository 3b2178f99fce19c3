"""The matrix of each library but timm, whose tests have an environment of their own."""

from parity_matrix import MatrixChecks


class TestModels(MatrixChecks):
    library = "acutance.models"


class TestTransformers(MatrixChecks):
    library = "transformers"


class TestTorchNN(MatrixChecks):
    library = "torch.nn"


class TestWritten(MatrixChecks):
    library = "hand-written"
