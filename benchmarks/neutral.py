"""How large a change of log HFC/LFC across a layer must be to mean something: the band that `explain` calls neutral.

    python benchmarks/neutral.py hf:FOLDER hf:FOLDER --text tests/resources/declaration.txt --seeds 3

Two spreads, on healthy models. From sample to sample: the standard deviation of a layer's change over the samples of
one model. From run to run: that of a layer's mean change over the seeds of the demo's plain ViT on the digits' test
images. Prints quantiles over layers and writes docs/evidence/neutral.json with every layer's.
"""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from acutance import sites
from acutance.explain import ChangeReader
from acutance.io import load_model
from acutance.lab.demo import demo_config, trained
from acutance.lab.train.provenance import made
from acutance.measure.walk import walk

EVIDENCE = Path(__file__).parents[1] / "docs" / "evidence" / "neutral.json"
PARTS = ("whole", "attention", "mlp")


def changes(model: Any, batches: Any) -> dict[str, Any]:
    """By part (layers, samples): the change of log HFC/LFC."""
    with sites.cached_lookup(), torch.no_grad():
        readers = [ChangeReader(site, number) for site, number in sites.layers_of(model)]
        walk(model, batches, *readers)
    found = [reader.result() for reader in readers]
    return {part: np.array([{"whole": at.whole, **at.parts}[part].by_sample for at in found]) for part in PARTS}


def of_digits(seed: int) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        model, task = trained(demo_config(f"loop.seed={seed}"), Path(folder))
    return changes(model, task.inputs("test", range(task.size("test"))).split(32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=EVIDENCE)
    arguments = parser.parse_args()
    found = {}
    for name in arguments.models:
        loaded = load_model(name)
        batches = loaded.text_batches(arguments.text, tokens=arguments.tokens, batch=4)
        found[loaded.name] = changes(loaded.model, batches)
    runs = [of_digits(seed) for seed in range(arguments.seeds)]
    found |= {f"digits, seed {seed}": run for seed, run in enumerate(runs)}
    spreads = {name: {part: values.std(1, ddof=1) for part, values in of.items()} for name, of in found.items()}
    if len(runs) > 1:
        means = {part: np.array([run[part].mean(1) for run in runs]) for part in PARTS}
        spreads["digits, run to run"] = {part: values.std(0, ddof=1) for part, values in means.items()}
    record: dict[str, Any] = {**made("measured"), "models": {}}
    for name, of in spreads.items():
        record["models"][name] = {part: {"spread": values.round(4).tolist()} for part, values in of.items()}
        for part, values in of.items():
            low, median, high = np.quantile(values, [0.05, 0.5, 0.95])
            print(f"{name:40} {part:10} median {median:.3f}, 5 % to 95 % of layers {low:.3f} to {high:.3f}")
    arguments.out.write_text(json.dumps(record, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
