"""The fuzzer on version 0.1, whose source is to be first on PYTHONPATH; the arguments are those of run.py.

    git worktree add /tmp/acutance-0.1 cf574fd
    PYTHONPATH=/tmp/acutance-0.1/src python tests/fuzz/adapter_0_1.py --minutes 5 --seed 1

What 0.1 did not have is left out; what it had elsewhere is put where it is now. 0.1 refuses more: that is no finding.
"""

import sys
from functools import wraps

from hypothesis import assume

import acutance


def main() -> int:
    if "acutance.mitigate" not in sys.modules:
        sys.exit(f"{acutance.__path__[0]} is not of 0.1: put its src first on PYTHONPATH")
    made = acutance.AttentionOperator.__init__

    @wraps(made)
    def without_sinks(self, *args, sink=None, **options):
        assume(sink is None)
        made(self, *args, **options)

    acutance.AttentionOperator.__init__ = without_sinks
    # `mitigate` was a module, which the function of the same name hides.
    sys.modules["acutance.sites.mitigate"] = sys.modules["acutance.mitigate"]
    import run
    import test_model_fuzz

    test_model_fuzz.REFUSES_MORE = True
    return run.main(["test_operator_fuzz", "test_model_fuzz"])


if __name__ == "__main__":
    sys.exit(main())
