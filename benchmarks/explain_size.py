"""Time and peak memory of `explain` on the weights of a wide, deep model.

    python benchmarks/explain_size.py                       # 100 layers of width 4096, 32 heads of 128, with verdicts
    python benchmarks/explain_size.py --kv-heads 8          # grouped queries: all eigenvalues of an H of rank 1024
    python benchmarks/explain_size.py --whole --layers 1    # all eigenvalues of one whole 4096 × 4096 H

Layers are made one at a time with random weights, as if a model were loaded shard by shard, and spectra come from the
function that `explain` calls per layer. Neither time includes making the weights. CPU seconds are the process's own;
elapsed seconds include other work on the machine. The peak is the growth of the resident set over a small warm-up. It
counts one layer's weights, all work space and the spectra, but no model; `resident_mib` is the whole process. Results
go to benchmarks/results, one CSV per dtype and PyTorch version.
"""

import argparse
import csv
import statistics
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from acutance.explain import Spectrum
from acutance.explain.weights import layer_spectrum
from acutance.lab.bench import results
from acutance.lab.bench.results import Row
from acutance.lab.bench.timing import MIB, resident_peak_bytes

RESULTS = Path(__file__).parent / "results"


def synthetic_site(layer: int, dim: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Any:
    """A stand-in for a site with one layer's random weights, at the scale of a new model."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(layer))
    value = draw(kv_heads * head_dim, dim).mul_(0.02).to(dtype)
    projection = draw(dim, heads * head_dim).mul_(0.02).to(dtype)
    found = {"layer": layer, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    read: dict[str, Any] = {"value_weight": lambda: value, "projection_weight": lambda: projection}
    read |= dict.fromkeys(("branch_gain", "pre_norm_gain", "post_norm"), lambda: None)
    return SimpleNamespace(**found, **read)


def benchmark(arguments: argparse.Namespace) -> Row:
    dtype = getattr(torch, arguments.dtype)

    def site(layer: int, shrink: int = 1) -> Any:
        heads, kv_heads = arguments.heads // shrink or 1, arguments.kv_heads // shrink or 1
        return synthetic_site(layer, arguments.dim // shrink, heads, kv_heads, arguments.head_dim, dtype)

    layer_spectrum(site(0, shrink=16), whole=True)  # a warm-up, so that libraries loaded on first use do not count
    before, elapsed, seconds, kept = resident_peak_bytes(), [], [], []
    for layer in range(1, arguments.layers + 1):
        weights = site(layer)
        start, cpu = time.perf_counter(), time.process_time()
        kept.append(layer_spectrum(weights, whole=arguments.whole or None))
        elapsed.append(time.perf_counter() - start)
        seconds.append(time.process_time() - cpu)
        print(f"layer {layer}/{arguments.layers}: {seconds[-1]:.2f} s of CPU", file=sys.stderr)
    written = len(Spectrum(tuple(kept)).to_json().encode())
    resident = resident_peak_bytes()
    held = weights.value_weight().nbytes + weights.projection_weight().nbytes
    command = results.command("python benchmarks/explain_size.py", sys.argv[1:], without="--out")
    return {
        **{name: getattr(arguments, name) for name in ("layers", "dim", "heads", "kv_heads", "head_dim", "whole")},
        "cpu_seconds": f"{sum(seconds):.1f}",
        "cpu_seconds_median": f"{statistics.median(seconds):.2f}",
        "cpu_seconds_lowest": f"{min(seconds):.2f}",
        "cpu_seconds_highest": f"{max(seconds):.2f}",
        "elapsed_seconds": f"{sum(elapsed):.1f}",
        "verdicts": ", ".join(f"{count} {family}" for family, count in Counter(s.family for s in kept).items()),
        "largest_error": f"{max(s.error for s in kept):.1e}",
        "peak_mib": f"{(resident - before) / MIB:.0f}",
        "resident_mib": f"{resident / MIB:.0f}",
        "json_mib": f"{written / MIB:.1f}",
        "layer_weights_mib": f"{held / MIB:.0f}",
        "eigenvalues_kept": sum(s.heads.size + (0 if s.deciding is None else s.deciding.size) for s in kept),
        "threads": torch.get_num_threads(),
        **results.provenance("cpu", command),
    }


def write(row: Row, arguments: argparse.Namespace) -> Path:
    """Add the row to the file of this dtype and PyTorch. It replaces rows of the same command or with other columns."""
    path, rows = arguments.out / results.file_name("explain_size", "cpu", arguments.dtype), []
    if path.exists():
        with path.open(newline="") as file:
            rows = [old for old in csv.DictReader(file) if old["command"] != row["command"] and [*old] == [*row]]
    return results.write_rows(path, [*rows, row], {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, help="fewer for grouped queries; default: heads")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float64"], default="bfloat16")
    parser.add_argument("--whole", action="store_true", help="all eigenvalues of the whole H")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    arguments.kv_heads = arguments.kv_heads or arguments.heads
    row = benchmark(arguments)
    shown = ("layers", "dim", "whole", "cpu_seconds", "cpu_seconds_median", "elapsed_seconds", "peak_mib", "verdicts")
    print(", ".join(f"{key} {row[key]}" for key in shown))
    print(f"written to {write(row, arguments)}", file=sys.stderr)


if __name__ == "__main__":
    main()
