"""Lets timm be imported beside torch's CPU build; import this first.

timm needs torchvision, and PyPI's torchvision needs torch's CUDA build: its compiled operators do not load into the
CPU build, and the import stops at the first two that it asks for. timm calls neither, so declaring them is enough.
"""

import torch

SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
DECLARED = torch.library.Library("torchvision", "FRAGMENT")  # what it declares lasts as long as the object

try:
    import torchvision
except RuntimeError as error:
    if "torchvision::nms does not exist" not in str(error):
        raise
    for operator in ("nms", "qnms"):
        DECLARED.define(operator + SIGNATURE)
    import torchvision  # noqa: F401
