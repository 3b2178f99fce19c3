import pytest
from parity_matrix import MatrixChecks


@pytest.mark.xdist_group("parity TestModels")  # one process finds all cells, and starts the two others once
class TestModels(MatrixChecks):
    library = "acutance.models"
