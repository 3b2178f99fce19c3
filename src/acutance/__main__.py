"""`python -m acutance`: the command line, for instance under torchrun."""

import os
import sys

from acutance.cli import run

if __name__ == "__main__":
    try:
        run()
    except SystemExit as left:  # with which a command always ends
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            sys.exit(left.code)
        from acutance.distributed import leave

        leave(left.code)
