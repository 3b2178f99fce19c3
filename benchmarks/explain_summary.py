"""What a Spectrum says per layer, without the eigenvalues: small enough to keep as evidence.

    acutance explain MODEL --text FILE --json spectrum.json
    acutance explain MODEL --norm ignore --json ignored.json
    python benchmarks/explain_summary.py spectrum.json --ignored ignored.json --out summary.json

`balance` is Σ Re λ / Σ |Re λ| over the eigenvalues of H that were learnt: −1 if all real parts are negative, 1 if all
are positive, 0 if they balance.
"""

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np

from acutance.explain import LayerSpectrum, Spectrum
from acutance.files.atomic import atomic_write


def balance(layer: LayerSpectrum) -> float:
    real = layer.spectrum.real
    return float(real.sum() / np.abs(real).sum())


def signs(spectrum: Spectrum) -> dict[str, float]:
    """The share of negative real parts over the eigenvalues of all layers, and the mean of the layers' balances."""
    every = np.concatenate([layer.spectrum.real for layer in spectrum.layers])
    return {
        "negative_share": float((every < 0).mean()),
        "balance": float(np.mean([balance(layer) for layer in spectrum.layers])),
    }


def row(layer: LayerSpectrum, plain: dict[str, Any]) -> dict[str, Any]:
    found = layer.dominance
    assert found is not None, "explain was run without data"
    return {
        "layer": layer.layer,
        "verdict": layer.verdict,
        "reason": layer.reason,
        "negative_share": layer.negative_share,
        "balance": balance(layer),
        "real_quantiles": layer.quantiles,
        "symmetry": layer.symmetry,
        "whole": [str(share) for share in found.whole or ()],
        "heads": [str(share) for share in found.heads],
        "predicted": str(found.predicted),
        "predicted_change": found.predicted_change,
        "undecided": found.undecided,
        **{
            name: {"mean": values.mean(), "lowest": values.min(), "highest": values.max()}
            for name, values in (("mu_min", found.mu_min_by_sample), ("mu_largest", found.mu_largest_by_sample))
        },
        "branch": plain["dominance"]["branch"],
        "block": plain["dominance"]["block"],
    }


def summarise(spectrum: Spectrum, ignored: Spectrum | None) -> dict[str, Any]:
    device = spectrum.context["device"]
    hardware = f"{platform.machine()} CPU" if device == "cpu" else device
    return {
        "context": {**spectrum.context, "hardware": hardware},
        "summary": spectrum.summary(),
        "whole": str(spectrum.share("whole")),
        "heads": str(spectrum.share("heads")),
        "signs": signs(spectrum),
        "signs_norm_ignored": None if ignored is None else signs(ignored),
        "layers": [row(*pair) for pair in zip(spectrum.layers, json.loads(spectrum.to_json())["layers"], strict=True)],
    }


def rounded(value: Any) -> Any:
    """Six digits: more than the data give."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spectrum", type=Path)
    parser.add_argument("--ignored", type=Path, help="the same model with --norm ignore")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    ignored = None if arguments.ignored is None else Spectrum.load(arguments.ignored)
    body = rounded(summarise(Spectrum.load(arguments.spectrum), ignored))
    print(atomic_write(arguments.out, (json.dumps(body, indent=1, ensure_ascii=False) + "\n").encode()))


if __name__ == "__main__":
    main()
