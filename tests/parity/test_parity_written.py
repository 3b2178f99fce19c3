from parity_matrix import MatrixChecks


class TestWritten(MatrixChecks):
    library = "hand-written"
