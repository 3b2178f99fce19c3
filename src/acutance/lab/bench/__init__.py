"""Speed and memory as ratios in one run: `acutance bench`, and what the scripts in `benchmarks/` share with it."""
