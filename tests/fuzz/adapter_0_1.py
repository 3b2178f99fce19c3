"""Runs the fuzzer on version 0.1, whose source must be first on PYTHONPATH. The arguments are those of run.py.

    git worktree add /tmp/acutance-0.1 cf574fd
    PYTHONPATH=/tmp/acutance-0.1/src python tests/fuzz/adapter_0_1.py --minutes 5 --seed 1

What 0.1 did not have is left out. It refuses more, which is no finding.
"""

import sys
from functools import wraps

import run
import test_model_fuzz
from hypothesis import assume
from laws import LAWS, Law
from test_operator_fuzz import SHARP

from acutance import AttentionOperator, __version__

made = AttentionOperator.__init__


@wraps(made)
def without_sinks(self, *args, sink=None, **options):
    assume(sink is None)
    made(self, *args, **options)


if __name__ == "__main__":
    if __version__ != "0.1.0":
        sys.exit(f"this is {__version__}: put the source of 0.1 first on PYTHONPATH")
    AttentionOperator.__init__, test_model_fuzz.REFUSES_MORE = without_sinks, True
    run.FILES = ("test_operator_fuzz", "test_model_fuzz")
    # Where masks are wrong too, sharp attention is to be found by itself.
    LAWS["entropies_of_sharp_attention"] = Law(SHARP, LAWS["entropies_are_those_of_the_rows"].check)
    sys.exit(run.main())
