"""`python -m acutance`: the command line, for instance under torchrun."""

from acutance import distributed as processes
from acutance.cli import run

if __name__ == "__main__":
    try:
        run()
    except SystemExit as left:  # with which a command always ends
        processes.leave(left.code)
