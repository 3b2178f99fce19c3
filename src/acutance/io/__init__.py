"""Models on disk and by name, and the data to feed them."""

from acutance.io.loading import batches_for, image_batches, load_model, text_batches
from acutance.io.saving import load, load_checkpoint, save

__all__ = ["batches_for", "image_batches", "load", "load_checkpoint", "load_model", "save", "text_batches"]
