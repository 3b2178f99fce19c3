"""Try every law on random cases for some time: python tests/fuzz/run.py --minutes 30 --seed 1

Progress goes to stderr. The results go to stdout at the end, also after Ctrl-C. A round of a seed is the same on every
machine.
"""

import argparse
import importlib
import sys
import time
import traceback
import warnings
from pathlib import Path

from hypothesis import seed
from laws import LAWS

sys.path.append(str(Path(__file__).parents[1]))
FILES = ("test_operator_fuzz", "test_metric_fuzz", "test_model_fuzz")
ROUND = 50  # examples


def fuzz(end: float, first_seed: int, chosen: list[str], broken: dict[str, str]) -> None:
    """Try the laws in turn until the time is over. A broken law is recorded and not tried again."""
    number = 0
    while time.monotonic() < end and len(broken) < len(chosen):
        for name in (name for name in chosen if name not in broken):
            if time.monotonic() >= end:
                break
            try:
                seed(first_seed * 10**6 + number)(LAWS[name].test(max_examples=ROUND))()
            except Exception as error:
                broken[name] = "".join(traceback.format_exception(error, limit=-3))
            state = f"broken:\n{broken[name]}" if name in broken else "holds"
            print(f"round {number}: {name}: {LAWS[name].tried['examples']} examples, {state}", file=sys.stderr)
        number += 1


def main() -> int:
    for file in FILES:
        importlib.import_module(file)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 10**6)
    parser.add_argument("--laws", nargs="+", choices=LAWS, default=list(LAWS))
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    begun, broken = time.monotonic(), dict[str, str]()
    try:
        fuzz(begun + 60 * given.minutes, given.seed, given.laws, broken)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    print(f"seed {given.seed}, {(time.monotonic() - begun) / 60:.1f} minutes")
    for name in given.laws:
        tried = LAWS[name].tried
        print(f"{tried['examples']:7} examples, {tried['refused']:6} refused: {name}{' BROKEN' * (name in broken)}")
    print(f"{sum(LAWS[name].tried['examples'] for name in given.laws):7} examples, {len(broken)} laws broken")
    for text in broken.values():
        print(f"\n{text}")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
