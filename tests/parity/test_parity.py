"""The matrix of each library but timm, whose tests have an environment of their own.

    ALL_CELLS=1 pytest -n 0 tests/parity/test_parity.py
    python tests/parity/test_parity.py

The first writes the evidence of all cells, the second the table of docs/parity.md.
"""

from parity_matrix import DOCS, MatrixChecks, table

PAGE, START = DOCS / "parity.md", "<!-- parity -->\n"


class TestModels(MatrixChecks):
    library = "acutance.models"


class TestTransformers(MatrixChecks):
    library = "transformers"


class TestTorchNN(MatrixChecks):
    library = "torch.nn"


class TestWritten(MatrixChecks):
    library = "hand-written"


def test_the_page_shows_the_evidence():
    shown = PAGE.read_text().split(START)[1].partition("\n<!-- end -->")[0]
    assert shown == table(), "run python tests/parity/test_parity.py"


if __name__ == "__main__":
    before, after = PAGE.read_text().split(START)
    PAGE.write_text(before + START + table() + "\n<!-- end -->" + after.partition("\n<!-- end -->")[2])
