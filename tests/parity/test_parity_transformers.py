import pytest
from parity_matrix import MatrixChecks


@pytest.mark.xdist_group("parity TestTransformers")  # one process finds all cells, and starts the two others once
class TestTransformers(MatrixChecks):
    library = "transformers"
