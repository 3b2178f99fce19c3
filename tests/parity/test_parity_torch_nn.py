import pytest
from parity_matrix import MatrixChecks


@pytest.mark.xdist_group("parity TestTorchNN")  # one process finds all cells, and starts the two others once
class TestTorchNN(MatrixChecks):
    library = "torch.nn"
