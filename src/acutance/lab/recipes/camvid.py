"""Segmenter with a DeiT-tiny encoder on CamVid, 200 epochs: segmentation on one GPU, from scratch or from an encoder.

No figure of either paper belongs to it. Not measured in full. Expect of 100 epochs with batches of 16, from scratch, a
test mIoU of 33.18, with NeuTRENO (λ̃ = 0.6) 33.87, the last weights at one scale: one seed, so without a spread
(docs/evidence/camvid; the first two commands with `--set loop.epochs=100 --set loop.batch_size=16`).

Needs `CamVid/` (367 frames to train on) and one GPU; 73,000 crops of 352 go forward and back.

Time: 278 s of the loop for those 100 epochs on one H200 (torch 2.11.0), with NeuTRENO 279 s, both at once and beside
other work, with six loader processes each; not timed by itself, and no bench has a Segmenter.

    acutance train camvid --data-dir /data
    acutance train camvid --data-dir /data --set task.model.mitigation=neutreno:0.6
    acutance train camvid --data-dir /data --set task.encoder_weights=deit_tiny.safetensors
    acutance evaluate runs/camvid-seed0 --multi-scale
"""

from __future__ import annotations

from dataclasses import replace

from acutance.lab.tasks.segmentation import CAMVID
from acutance.lab.train.config import Config, LoopConfig, OptimConfig, ScheduleConfig


def config() -> Config:
    """AdamW, which an encoder without pretraining needs, a warm-up and a cosine."""
    return Config(
        task=replace(CAMVID, workers=8),
        optim=OptimConfig(name="adamw", lr=5e-4, weight_decay=0.05, clip=1.0),
        schedule=ScheduleConfig(name="cosine", warmup=10, start=1e-6, final=1e-6),
        loop=LoopConfig(
            epochs=200,
            batch_size=8,
            precision="bf16",
            compile=True,
            graph=True,
            checkpoint_every=1_000,
            evaluate_every=10,
        ),
    )
