"""A 6-layer language model on the Penn Treebank, 60 epochs: the smallest real text.

No figure of either paper belongs to it. Not measured here yet.

Needs `ptb/` (ptb.train.txt and the others) and one GPU; 56 million words go forward and back.

Time: not measured; `acutance train` shows words/s and the time left.

    acutance train ptb --data-dir /data
    acutance train ptb --data-dir /data --set task.model.mitigation=neutreno:0.4
"""

from __future__ import annotations

from acutance.lab.recipes._small_text import small_text
from acutance.lab.tasks.language import PTB
from acutance.lab.train.config import Config


def config() -> Config:
    """The recipe for small texts."""
    return small_text(PTB, epochs=60)
