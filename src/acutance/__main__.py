"""`python -m acutance`: the command line, for instance under torchrun."""

import os
import sys

from acutance.cli import run

if __name__ == "__main__":
    try:
        run()
    except SystemExit as left:  # with which a command always ends
        if "TORCHELASTIC_RUN_ID" in os.environ and not isinstance(left.code, str):
            # Threads of gloo sometimes abort the interpreter's shutdown, so a process of torchrun leaves at once.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(left.code or 0)
        raise
