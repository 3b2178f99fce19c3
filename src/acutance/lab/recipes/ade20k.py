"""Segmenter with a DeiT-tiny encoder on ADE20K, 64 epochs: NeuTRENO's Tables 2 and 6.

Published (https://arxiv.org/abs/2312.00751), mean IoU at one scale and at several: 35.72 / 36.68 %, with NeuTRENO in
encoder and decoder 37.24 / 38.06; with symmetric attention 35.18 / 36.00, with NeuTRENO 35.68 / 36.39. Not measured
here yet.

Needs `ADEChallengeData2016/`, one GPU and an encoder trained on ImageNet (with the same mitigation): by default that
of `acutance train deit_tiny`, or DeiT's published .pth file. 1.3 million crops of 512 go forward and back.

Time: not measured, and no bench has a Segmenter; `acutance train` shows images/s and the time left.

    acutance train ade20k --data-dir /data
    acutance train ade20k --data-dir /data --set task.encoder_weights=deit_tiny_patch16_224-a1311bcf.pth
    acutance train ade20k --data-dir /data --set task.model.mitigation=neutreno:0.6 --set task.encoder_weights=…
    acutance evaluate runs/ade20k-seed0 --multi-scale
"""

from __future__ import annotations

from dataclasses import replace

from acutance.lab.recipes._deit import TRAINED
from acutance.lab.tasks.segmentation import ADE20K
from acutance.lab.train.config import Config, LoopConfig, OptimConfig, ScheduleConfig


def config() -> Config:
    """The public code's: Nesterov's SGD, a power of 0.9, 8 crops of 512. All training images: nothing is chosen."""
    return Config(
        task=replace(ADE20K, train_on="all", workers=8, encoder_weights=TRAINED),
        optim=OptimConfig(name="sgd", lr=1e-3, weight_decay=0.0, momentum=0.9),
        schedule=ScheduleConfig(name="poly", final=1e-5, power=0.9),
        loop=LoopConfig(epochs=64, batch_size=8, checkpoint_every=2_000, evaluate_every=8),
    )
