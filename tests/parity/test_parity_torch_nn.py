from parity_matrix import MatrixChecks


class TestTorchNN(MatrixChecks):
    library = "torch.nn"
