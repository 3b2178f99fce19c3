"""`python -m acutance`: the command line, for instance under torchrun."""

from acutance.cli import run

if __name__ == "__main__":
    run()
