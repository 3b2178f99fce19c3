"""A cell is exact or refused as it is pinned; being the other, or refused for another reason, is a failure."""

import pytest
from parity_cells import REFUSED, Cell, Outcome, assert_as_pinned, cells, refusal
from parity_subjects import SUBJECTS

FREE = Cell("eager", "none", "multi-head", "one process", "float32")
PINNED = Cell("eager", "re-entrant", "multi-head", "one process", "float32")
WORDS = "v⁰, the first layer's values, did not come through this activation checkpointing: use use_reentrant=False"
FAILURES = [
    (FREE, Outcome("refused", message=WORDS)),
    (FREE, Outcome("wrong", 0.1)),
    (FREE, Outcome("crashed", message="RuntimeError")),
    (PINNED, Outcome("exact", 0.0)),
    (PINNED, Outcome("crashed", message=WORDS)),
    (PINNED, Outcome("refused", message="FeatScale cannot be used here")),
]


@pytest.mark.parametrize(("cell", "outcome"), FAILURES)
def test_what_is_not_as_pinned_fails(cell, outcome):
    with pytest.raises(AssertionError):
        assert_as_pinned("timm", cell, outcome)


def test_what_is_as_pinned_passes():
    assert_as_pinned("timm", FREE, Outcome("exact", 1e-7))
    assert_as_pinned("timm", PINNED, Outcome("refused", message=WORDS))


def test_every_pin_is_of_a_cell():
    pinned = {
        (library, cell.checkpointing) for library in SUBJECTS for cell in cells(library) if refusal(library, cell)
    }
    assert pinned == REFUSED.keys()
