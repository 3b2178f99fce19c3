"""Semantic segmentation with a Segmenter: ADE20K, CamVid."""

from dataclasses import replace

from acutance.lab.recipes.imagenet import TRAINED
from acutance.lab.tasks.segmentation import ADE20K, CAMVID
from acutance.lab.train.config import Config, LoopConfig, OptimConfig, ScheduleConfig


def ade20k() -> Config:
    """Segmenter with a DeiT-tiny encoder on ADE20K, 64 epochs: NeuTRENO's Tables 2 and 6.

    Published (https://arxiv.org/abs/2312.00751), mean IoU at one scale and at several: 35.72 / 36.68 %, with NeuTRENO
    in encoder and decoder 37.24 / 38.06; with symmetric attention 35.18 / 36.00, with NeuTRENO 35.68 / 36.39. Not
    measured here yet. The settings are those of the public code. All training images are used, since nothing is chosen.

    Needs `ADEChallengeData2016/`, one GPU and an encoder trained on ImageNet (with the same mitigation): by default
    that of `acutance train deit_tiny`, or DeiT's published .pth file. The model sees 1.3 million crops of 512.
    Time: not measured, and no bench has a Segmenter; `acutance train` shows images/s and the time left.

        acutance train ade20k --data-dir /data
        acutance train ade20k --data-dir /data --set task.encoder_weights=deit_tiny_patch16_224-a1311bcf.pth
        acutance train ade20k --data-dir /data --set task.model.mitigation=neutreno:0.6 --set task.encoder_weights=…
        acutance evaluate runs/ade20k-seed0 --multi-scale
    """
    return Config(
        task=replace(ADE20K, train_on="all", workers=8, encoder_weights=TRAINED),
        optim=OptimConfig(name="sgd", lr=1e-3, weight_decay=0.0, momentum=0.9),
        schedule=ScheduleConfig(name="poly", final=1e-5, power=0.9),
        loop=LoopConfig(epochs=64, batch_size=8, checkpoint_every=2_000, evaluate_every=8),
    )


def camvid() -> Config:
    """Segmenter with a DeiT-tiny encoder on CamVid, 200 epochs: on one GPU, from scratch or from an encoder.

    Neither paper has a figure for it. Not measured in full. Expect from 100 epochs with batches of 16, from scratch,
    a test mIoU of 33.18, with NeuTRENO (λ̃ = 0.6) 33.87, for the last weights at one scale and one seed, so no spread
    (docs/evidence/camvid; the first two commands with `--set loop.epochs=100 --set loop.batch_size=16`).

    Needs `CamVid/` (367 frames to train on) and one GPU, for 73,000 crops of 352. AdamW and the warm-up are for an
    encoder without pretraining. Time: 278 s of the loop for those 100 epochs on one H200 (torch 2.11.0), with NeuTRENO
    279 s. The two ran at once, beside other work, with six loader processes each; not timed by itself.

        acutance train camvid --data-dir /data
        acutance train camvid --data-dir /data --set task.model.mitigation=neutreno:0.6
        acutance train camvid --data-dir /data --set task.encoder_weights=deit_tiny.safetensors
        acutance evaluate runs/camvid-seed0 --multi-scale
    """
    return Config(
        task=replace(CAMVID, workers=8),
        optim=OptimConfig(name="adamw", lr=5e-4, weight_decay=0.05, clip=1.0),
        schedule=ScheduleConfig(name="cosine", warmup=10, start=1e-6, final=1e-6),
        loop=LoopConfig(
            epochs=200, batch_size=8, precision="bf16", compile=True, graph=True, checkpoint_every=1_000,
            evaluate_every=10,
        ),
    )  # fmt: skip
