"""Lets timm be imported beside torch's CPU build; import this first.

timm needs torchvision. PyPI's torchvision is built for torch's CUDA build: its compiled operators do not load into the
CPU build, and the import fails at two of them. timm calls neither, so declaring them is enough.
"""

import torch

SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
DECLARED = torch.library.Library("torchvision", "FRAGMENT")  # declarations last as long as this object

try:
    import torchvision
except RuntimeError as error:
    if "torchvision::nms does not exist" not in str(error):
        raise
    for operator in ("nms", "qnms"):
        DECLARED.define(operator + SIGNATURE)
    import torchvision  # noqa: F401
