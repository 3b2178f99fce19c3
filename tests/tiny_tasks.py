"""A text and a segmentation set in their usual layouts, and tiny tasks on them."""

import numpy as np
import torch
from PIL import Image

from acutance.lab.tasks.language import LanguageTaskConfig
from acutance.lab.tasks.segmentation import SegmentationConfig, WindowConfig
from acutance.models import LanguageConfig, SegmenterConfig

COMMON, MIDDLE, RARE, RAREST = ([f"{name}{i}" for i in range(4)] for name in ("common", "middle", "rare", "rarest"))
CUTOFFS = (5, 9, 13)  # <eos> is the most frequent word, then the four kinds
LANGUAGE = LanguageConfig(dim=8, depth=3, heads=2, hidden=12, cutoffs=(*CUTOFFS, 20_000), dropout=0.1)
SEGMENTER = SegmenterConfig(
    num_classes=11, image_size=16, patch_size=4, dim=12, depth=3, heads=3, decoder_heads=2, drop_path=0.1
)
WINDOWS = WindowConfig(short_side=18, size=16, stride=12, at_once=3)
SIZES = {"train": [(18, 24)] * 8, "val": [(18, 24), (20, 24), (18, 50)], "test": [(18, 24), (18, 30), (25, 18)]}


def language(folder, model=LANGUAGE, **options):
    """A text of 17 words. Rare words only come in the second half, and the rarest after the last whole sequence."""
    place, draw = folder / "wikitext-2", torch.Generator().manual_seed(0)

    def lines(words, count):
        picked = torch.randint(len(words), (count, 9), generator=draw).tolist()
        return "".join(" " + " ".join(words[i] for i in line) + " \n" for line in picked)

    if not place.exists():
        place.mkdir()
        common, more = 4 * COMMON, 4 * COMMON + 2 * MIDDLE + RARE
        train = lines(common, 20) + lines(more, 20) + " " + " ".join(RAREST) + " \n"
        for name, text in {"train": train, "valid": lines(more, 10), "test": lines(more, 6)}.items():
            (place / f"wiki.{name}.tokens").write_text(text, encoding="utf-8")
    chosen = {"length": 8, "val_stride": 8, "windows": 5, **options}
    return LanguageTaskConfig(corpus="wikitext-2", data_dir=str(folder), model=model, **chosen)


def segmentation(folder, model=SEGMENTER, **options):
    """Images of several sizes whose colour is the label. Every other image is mostly void (11)."""
    random = np.random.default_rng(0)
    for split, sizes in SIZES.items() if not (folder / "CamVid").exists() else ():
        for place in (split, f"{split}annot"):
            (folder / "CamVid" / place).mkdir(parents=True)
        for number, (height, width) in enumerate(sizes):
            labels = np.kron(random.integers(0, 12, (height // 3 + 1, width // 3 + 1)), np.ones((3, 3)))
            labels = labels[:height, :width].astype(np.uint8)
            if number % 2:
                labels[:, 6:] = 11
            image = np.stack([labels * 20, 255 - labels * 20, labels * 7], axis=-1).astype(np.uint8)
            Image.fromarray(image).save(folder / "CamVid" / split / f"{number}.png")
            Image.fromarray(labels).save(folder / "CamVid" / f"{split}annot" / f"{number}.png")
    return SegmentationConfig(dataset="camvid", data_dir=str(folder), model=model, windows=WINDOWS, **options)
