"""A 6-layer language model on WikiText-2, 40 epochs: language modelling on one GPU.

No figure of either paper belongs to it. Not measured here yet.

Needs `wikitext-2/` (the word-level token files) and one GPU; 84 million words go forward and back.

Time: not measured; `acutance train` shows words/s and the time left.

    acutance train wikitext2 --data-dir /data
    acutance train wikitext2 --data-dir /data --set task.model.mitigation=neutreno:0.4
    acutance evaluate runs/wikitext2-seed0
"""

from __future__ import annotations

from acutance.recipes._small_text import small_text
from acutance.tasks.language import WIKITEXT_2
from acutance.train.config import Config


def config() -> Config:
    """The recipe for small texts."""
    return small_text(WIKITEXT_2, epochs=40)
