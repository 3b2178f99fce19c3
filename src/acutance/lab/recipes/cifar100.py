"""ViT-Ti/4 on CIFAR-100 at 32×32, from scratch, with a strong recipe: 100 epochs of DeiT's augmentation.

Expect 74.49 ± 0.23 % top-1 on the test set and with NeuTRENO (λ̃ = 0.6) 75.29 ± 0.15 %, trained on all images (mean and
standard deviation of seeds 0, 1, 2; docs/evidence/cifar100). Published by others (https://arxiv.org/abs/2401.04301,
poster): ViT-Ti 66.78 ± 0.1 %, ViT-Ti⁺ 64.34 ± 0.3 %, ViT-Ti⁻ 66.62 ± 0.3 %, with an image size and a patch that are
unstated; the spectra (eigen) have not been measured here yet.

Needs `cifar-100-python/` and one GPU; 5 million images go forward and back, which are held and augmented there.

Time: 93 s of the loop on one H200 (torch 2.11.0) at 71,224 images/s, with NeuTRENO 94 to 98 s at 68,655 images/s, about
20 s of them before step 50; the first run of all, which compiled everything, took 141 s. Not timed: spectra (eigen).
`loop.graph` takes their steps like any other, but has not been tried with them, so the command below is without;
`acutance bench --only eigen` times polar, householder and qr in the CUDA graphs that `torch.compile` makes.

    acutance train cifar100 --data-dir /data --set task.train_on=all
    acutance train cifar100 --data-dir /data --set task.train_on=all --set task.model.mitigation=neutreno:0.6
    acutance train cifar100 --data-dir /data --set task.model.mitigation=eigen:negative --set loop.graph=false
    acutance evaluate runs/cifar100-train_on=all-seed0
"""

from __future__ import annotations

from acutance.lab.recipes._small_images import small_images
from acutance.lab.train.config import Config


def config() -> Config:
    """The strong recipe."""
    return small_images("cifar100", num_classes=100)
