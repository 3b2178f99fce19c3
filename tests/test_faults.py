"""The planted faults of tests/faults still fit the source; whether they are caught, `make faults` says."""

import re
from collections import Counter

import pytest

from faults.run import ROOT, read_faults

FAULTS = read_faults()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.room}/{fault.name}")
def test_a_fault_can_be_planted_and_its_tests_are_there(fault):
    fault.planted((ROOT / "src" / "acutance" / fault.file).read_text("utf-8"))
    assert fault.does.endswith(".")
    assert fault.tests
    for test in fault.tests:
        file, _, name = test.partition("::")
        text = (ROOT / file).read_text("utf-8")
        assert not name or re.search(rf"^def {re.escape(name.partition('[')[0])}\(", text, re.MULTILINE), test


def test_names_are_told_apart_and_every_room_has_three():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert min(Counter(fault.room for fault in FAULTS).values()) >= 3
