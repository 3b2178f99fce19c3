"""Compare the corruptions with those of imagecorruptions, which takes 430 MB and works image by image.

    pip install imagecorruptions-imaug==1.1.5
    python benchmarks/corruption_parity.py --data-dir DATA

For each corruption and severity it prints the mean change of a pixel by ours and by theirs, and the mean difference
between the two, in levels of 255. Without randomness the difference should vanish; with it, the changes should agree.
"""

import argparse
from pathlib import Path

import numpy as np
import torch

from acutance.lab.data import load_images
from acutance.lab.robustness.corruptions import CORRUPTIONS, SEVERITIES, corrupt


def theirs(images: torch.Tensor, name: str, severity: int) -> torch.Tensor:
    from imagecorruptions import corrupt as corrupt_one

    pictures = images.permute(0, 2, 3, 1).numpy()
    changed = [corrupt_one(picture, corruption_name=name, severity=severity) for picture in pictures]
    return torch.from_numpy(np.stack(changed)).permute(0, 3, 1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="cifar100")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--corruptions", default=",".join(CORRUPTIONS))
    parser.add_argument("--save", type=Path, help="also write theirs here, for acutance robustness --corrupted-dir")
    arguments = parser.parse_args()
    np.random.seed(0)  # noqa: NPY002  (the generator that most of theirs draw from)
    data = load_images(arguments.dataset, arguments.data_dir, "test")
    images = data.images[: arguments.images]
    print("corruption,severity,change_ours,change_theirs,difference")
    for name in arguments.corruptions.split(","):
        others = []
        for severity in SEVERITIES:
            own, other = corrupt(images, name, severity), theirs(images, name, severity)
            pairs = ((own, images), (other, images), (own, other))
            figures = [float((a.float() - b.float()).abs().mean()) for a, b in pairs]
            print(name, severity, *(f"{figure:.2f}" for figure in figures), sep=",", flush=True)
            others.append(other.permute(0, 2, 3, 1).numpy())
        if arguments.save is not None:
            arguments.save.mkdir(parents=True, exist_ok=True)
            np.save(arguments.save / f"{name}.npy", np.concatenate(others))
            np.save(arguments.save / "labels.npy", np.tile(data.labels[: arguments.images].numpy(), len(SEVERITIES)))


if __name__ == "__main__":
    main()
