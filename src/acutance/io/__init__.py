"""Models on disk and by name, and the data to feed them."""

from acutance.io.inputs import Batches, LoadedModel, batches_for, centre_crop, image_batches, text_batches
from acutance.io.loading import load_model
from acutance.io.saving import load, load_checkpoint, save

__all__ = [
    "Batches",
    "LoadedModel",
    "batches_for",
    "centre_crop",
    "image_batches",
    "load",
    "load_checkpoint",
    "load_model",
    "save",
    "text_batches",
]
