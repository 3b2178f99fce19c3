import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "parity"))

from parity_matrix import MatrixChecks


class TestTimm(MatrixChecks):
    libraries = ("timm",)
