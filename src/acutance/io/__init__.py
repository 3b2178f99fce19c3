"""Models on disk and by name, and the data to feed them.

`load` and `save` are for models of any library; `load_model` takes the names of the command line. What lab knows of
runs is found by an entry point, so nothing here imports lab.
"""

from acutance.io.inputs import Batches, LoadedModel, centre_crop, image_batches, text_batches
from acutance.io.loading import load_model
from acutance.io.saving import load, load_checkpoint, save

__all__ = [
    "Batches", "LoadedModel", "centre_crop", "image_batches", "load", "load_checkpoint", "load_model", "save",
    "text_batches",
]  # fmt: skip
