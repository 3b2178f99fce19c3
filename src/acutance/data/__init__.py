"""Data in the layouts its users already have, and what is done to it before a model sees it."""

from acutance.data.digits import Split, digits
from acutance.data.images import IMAGE_SETS, Images, load_images
from acutance.data.segmentation import SegmentationSet, load_segmentation
from acutance.data.subsets import fraction, held_out
from acutance.data.tokens import CORPORA, Corpus, load_corpus

__all__ = [
    "CORPORA",
    "IMAGE_SETS",
    "Corpus",
    "Images",
    "SegmentationSet",
    "Split",
    "digits",
    "fraction",
    "held_out",
    "load_corpus",
    "load_images",
    "load_segmentation",
]
