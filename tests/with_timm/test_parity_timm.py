import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "parity"))

import pytest
from parity_matrix import MatrixChecks


@pytest.mark.xdist_group("parity TestTimm")  # one process finds all cells, and starts the two others once
class TestTimm(MatrixChecks):
    library = "timm"
