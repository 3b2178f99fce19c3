"""A 6-layer language model on WikiText-2, 40 epochs: language modelling on one GPU.

No figure of either paper belongs to it. Expect a test perplexity of 98.74, with NeuTRENO (λ̃ = 0.4) 94.59, the last
weights at stride 1: one seed, so without a spread (docs/evidence/wikitext2).

Needs `wikitext-2/` (the word-level token files) and one GPU; 84 million words go forward and back.

Time: below 225 s of the loop on one H200 (torch 2.11.0) that did other work as well; not timed by itself.

    acutance train wikitext2 --data-dir /data
    acutance train wikitext2 --data-dir /data --set task.model.mitigation=neutreno:0.4
    acutance evaluate runs/wikitext2-seed0
"""

from __future__ import annotations

from acutance.lab.recipes._small_text import small_text
from acutance.lab.tasks.language import WIKITEXT_2
from acutance.lab.train.config import Config


def config() -> Config:
    """The recipe for small texts."""
    return small_text(WIKITEXT_2, epochs=40)
