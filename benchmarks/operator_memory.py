"""Peak memory of the attention operator against the number of tokens.

    python benchmarks/operator_memory.py --device cpu --tokens 2048 8192
    python benchmarks/operator_memory.py --device cuda

One row per operation and number of tokens: the peak above what the inputs take, the matrix it avoids, and the
time. On CUDA the allocator's own peak; on the CPU the growth of the resident set of a fresh process per cell,
which also counts the libraries' work space. The growth exponent is the slope of log(peak) over log(tokens):
1 is linear, 2 is the matrix. A cell over the time limit is a row without a peak, and a note that says so. Results go
to benchmarks/results, one CSV per device, dtype and versions.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from acutance.attention.operator import AttentionOperator
from acutance.lab.bench import results
from acutance.lab.bench.timing import MIB, resident_peak_bytes

HEADS = {"cpu": 2, "cuda": 8}
DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
WIDTH = 64

OPERATIONS: dict[str, Callable[[AttentionOperator, torch.Tensor], object]] = {
    "A @ x": lambda A, x: A @ x,
    "A.T @ y": lambda A, x: A.T @ x,
    "logsumexp": lambda A, x: A.logsumexp(),
    "eigenvalues(k=4)": lambda A, x: A.eigenvalues(4),
    "stationary": lambda A, x: A.stationary(),
}

Cell = dict[str, Any]


def inputs(tokens: int, device: str, dtype: str) -> tuple[AttentionOperator, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (1, HEADS[device], tokens, WIDTH)
    q, k, x = (torch.randn(shape, generator=generator).to(device, getattr(torch, dtype)) for _ in range(3))
    return AttentionOperator(q, k), x


def measure(operation: str, tokens: int, device: str, dtype: str) -> Cell:
    """Peak and time of one operation in this process."""
    run = OPERATIONS[operation]
    # A small run first, so that what is loaded on first use is not counted.
    run(*inputs(640, device, dtype))
    A, x = inputs(tokens, device, dtype)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        before = resident_peak_bytes()
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(A, x)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    after = torch.cuda.max_memory_allocated() if device == "cuda" else resident_peak_bytes()
    notes = "; ".join(str(warning.message) for warning in caught)
    return {"peak_mib": round((after - before) / MIB, 2), "seconds": round(seconds, 3), "note": notes}


def measure_in_a_fresh_process(operation: str, tokens: int, device: str, dtype: str, limit: float) -> Cell:
    """A peak of the resident set belongs to a process and never falls: one process per cell."""
    command = [sys.executable, __file__, "--device", device, "--dtype", dtype, "--tokens", str(tokens)]
    command += ["--cell", operation]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"note": f"over {limit:g} s, not finished"}
    cell: Cell = json.loads(done.stdout)
    return cell


def benchmark(arguments: argparse.Namespace) -> list[Cell]:
    device, dtype = arguments.device, arguments.dtype
    rows: list[Cell] = []
    for tokens in arguments.tokens:
        for operation in arguments.operations:
            print(f"{device} {dtype} {tokens:>6} tokens  {operation} …", end="", file=sys.stderr, flush=True)
            if device == "cuda":
                cell = measure(operation, tokens, device, dtype)
            else:
                cell = measure_in_a_fresh_process(operation, tokens, device, dtype, arguments.limit)
            print(f" {cell}", file=sys.stderr)
            matrix = HEADS[device] * tokens**2 * getattr(torch, dtype).itemsize / MIB
            share = f"{cell['peak_mib'] / matrix:.5f}" if "peak_mib" in cell else ""
            row = {"tokens": tokens, "op": operation, "peak_mib": "", "peak_to_matrix": share}
            rows.append(row | {"matrix_mib": round(matrix), **cell})
    return rows


def growth(rows: list[Cell], operation: str) -> float | None:
    """Least-squares slope of log(peak) over log(tokens), of what finished."""
    cells = [row for row in rows if row["op"] == operation and (row["peak_mib"] or 0) > 0]
    points = [(math.log(cell["tokens"]), math.log(cell["peak_mib"])) for cell in cells]
    return statistics.linear_regression(*zip(*points, strict=True)).slope if len(points) > 1 else None


def main() -> None:
    parser = results.script_parser(__doc__)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help=f"default: {DTYPE}")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--operations", nargs="+", choices=list(OPERATIONS), default=list(OPERATIONS))
    parser.add_argument("--limit", type=float, default=180.0, help="seconds per CPU cell")
    parser.add_argument("--cell", choices=list(OPERATIONS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.dtype = arguments.dtype or DTYPE[arguments.device]
    if arguments.cell:
        print(json.dumps(measure(arguments.cell, arguments.tokens[0], arguments.device, arguments.dtype)))
        return
    rows = benchmark(arguments)
    for operation in arguments.operations:
        if (slope := growth(rows, operation)) is not None:
            print(f"{operation}: memory grows as tokens^{slope:.2f}")
    results.show(rows, *rows[0])
    where = arguments.results, arguments.device, arguments.dtype
    shared = {"heads": HEADS[arguments.device], "width": WIDTH}
    print(results.script_rows("operator_memory", rows, *where, toy=False, **shared))


if __name__ == "__main__":
    main()
