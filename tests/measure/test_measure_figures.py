"""The figures that docs/measure.md publishes are those of the records beside them."""

import re
from pathlib import Path

import pytest

from acutance.measure.profile import Profile

DOCS = Path(__file__).parents[2] / "docs"
COLUMNS = [  # metric, tap, digits
    ("token_cosine", "block", 3),
    ("token_cosine", "attention", 3),
    ("hfc_lfc_spectral", "block", 2),
    ("effective_rank", "block", 0),
    ("norm_spread", "block", 2),
    ("attention_entropy", "attention_matrix", 2),
]


@pytest.mark.parametrize(
    ("heading", "record"), [("all-MiniLM-L6-v2:", "minilm"), ("SmolLM2-135M-Instruct:", "smollm2")]
)
def test_every_layer_is_published_as_measured(heading: str, record: str) -> None:
    profile = Profile.load(DOCS / "evidence" / "real-models" / f"{record}.json")
    readings = {(r.metric, r.tap, r.layer): r for r in profile.readings}
    table = (DOCS / "measure.md").read_text().split(f"\n{heading}\n")[1].split("\n\n")[0]
    published = re.findall(r"^\| \d.*$", table, re.MULTILINE)
    expected = []
    for layer in profile.layers("token_cosine", "block"):
        found = [(readings.get((metric, tap, layer)), digits) for metric, tap, digits in COLUMNS]
        cells = ["–" if r is None else f"{r.mean:.{digits}f} ± {r.std:.{digits}f}" for r, digits in found]
        expected.append(f"| {' | '.join([str(layer), *cells])} |")
    assert published == expected
    assert profile.context["versions"].keys() >= {"torch", "transformers"}
