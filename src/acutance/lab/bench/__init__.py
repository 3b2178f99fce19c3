"""Speed and memory as ratios within one run: `acutance bench`, and code shared with the scripts in `benchmarks/`."""
