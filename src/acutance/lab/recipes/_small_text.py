"""A recipe for small texts, shared by WikiText-2 and the Penn Treebank. It is not tuned."""

from __future__ import annotations

from acutance.lab.tasks.language import LanguageTaskConfig
from acutance.lab.train.config import Config, LoopConfig, OptimConfig, ScheduleConfig


def small_text(task: LanguageTaskConfig, *, epochs: int) -> Config:
    """AdamW, a warm-up and a cosine to 0, 32 sequences; dropout does most against learning the text by heart."""
    return Config(
        task=task,
        optim=OptimConfig(name="adamw", lr=5e-4, weight_decay=0.1, clip=0.25),
        schedule=ScheduleConfig(name="cosine", warmup=2),
        loop=LoopConfig(
            epochs=epochs, batch_size=32, precision="bf16", compile=True, graph=True, checkpoint_every=2_000
        ),
    )
