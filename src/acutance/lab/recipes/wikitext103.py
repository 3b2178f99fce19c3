"""The 16-layer language model on WikiText-103, 500,000 steps: NeuTRENO's Table 3.

Published (https://arxiv.org/abs/2312.00751): test perplexity 34.29, with NeuTRENO (λ̃ = 0.4) 33.70. Not measured here
yet.

Needs `wikitext-103/` (the word-level token files) and a GPU; 12.3 billion words go forward and back.

Time: not measured; `acutance train` shows words/s and the time left.

    acutance train wikitext103 --data-dir /data
    acutance train wikitext103 --data-dir /data --set task.model.mitigation=neutreno:0.4
    acutance evaluate runs/wikitext103-seed0
"""

from __future__ import annotations

from acutance.lab.tasks.language import WIKITEXT_103
from acutance.lab.train.config import Config, LoopConfig, OptimConfig, ScheduleConfig

STEPS = 500_000
WARMUP_STEPS = 2_000
STEPS_PER_EPOCH = 4_200  # (103,227,021 words // 96 columns − 1) // 256 words


def config() -> Config:
    """Adam, a cosine to 0 over all steps beneath a warm-up, gradients clipped at 0.25, 96 sequences of 256 words."""
    return Config(
        task=WIKITEXT_103,
        optim=OptimConfig(name="adam", lr=2.5e-4, weight_decay=0.0, clip=0.25),
        schedule=ScheduleConfig(name="cosine", warmup=WARMUP_STEPS / STEPS_PER_EPOCH, warmup_inside=True),
        loop=LoopConfig(epochs=STEPS / STEPS_PER_EPOCH, batch_size=96, checkpoint_every=5_000, log_every=200),
    )
