from parity_matrix import MatrixChecks


class TestTransformers(MatrixChecks):
    library = "transformers"
