"""The matrix of every library but timm, whose tests have an environment of their own.

docs/parity.md has the commands that write the evidence of all cells, and its tables.
"""

import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for the script

from parity_matrix import DOCS, MatrixChecks, table, table_of_errors

PAGE = DOCS / "parity.md"


class TestParity(MatrixChecks):
    libraries = ("acutance.models", "transformers", "torch.nn", "hand-written")


def with_tables(page: str) -> str:
    for name, made in (("parity", table()), ("errors", table_of_errors())):
        page = re.sub(rf"(?s)(<!-- {name} -->\n).*?(<!-- end -->)", rf"\g<1>{made}\n\g<2>", page)
    return page


def test_the_page_shows_the_evidence():
    assert PAGE.read_text() == with_tables(PAGE.read_text()), "run python tests/parity/test_parity.py"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
