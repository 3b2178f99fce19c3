from parity_matrix import MatrixChecks


class TestModels(MatrixChecks):
    library = "acutance.models"
