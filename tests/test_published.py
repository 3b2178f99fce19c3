"""What the pages publish is what the files in benchmarks/results and docs/evidence hold."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))
import figures  # noqa: E402


@pytest.mark.parametrize(("page", "heading", "place", "rows"), figures.TABLES)
def test_a_table_is_what_its_file_gives(page, heading, place, rows):
    """If not: `python docs/figures.py`."""
    assert figures.updated(page, heading, place, rows()) == (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize(("page", "told"), figures.SENTENCES)
def test_a_sentence_says_what_its_file_gives(page, told):
    assert figures.missing(page, told()) == []
