"""Data sets in their usual layouts, and what happens to them before a model sees them."""

from acutance.lab.data.images import IMAGE_SETS, Images, Split, digits, load_images
from acutance.lab.data.segmentation import SegmentationSet, load_segmentation
from acutance.lab.data.source import fraction, held_out
from acutance.lab.data.tokens import CORPORA, Corpus, load_corpus

__all__ = [
    "CORPORA", "IMAGE_SETS", "Corpus", "Images", "SegmentationSet", "Split", "digits", "fraction", "held_out",
    "load_corpus", "load_images", "load_segmentation",
]  # fmt: skip
