"""Where timm is installed its ViT is what `acutance bench` divides by."""

import pytest
import torch

from acutance.lab.bench import measuring, steps
from acutance.lab.bench.timing import Settings


def test_timms_vit_is_the_baseline() -> None:
    for _, (*_, rows) in steps.tables(Settings("cpu"), "steps-224"):
        assert rows[0]["variant"] == "timm's ViT"
        assert rows[0]["note"] == "the baseline"
        variants = ("", ", tokens in bfloat16 between blocks", ", no fused kernel")
        *others, floor = [row["variant"] for row in rows[1:]]
        assert others == ["plain ViT", *(f"NeuTRENO{variant}" for variant in variants)]
        assert floor == "floor of the plain model"


@pytest.mark.parametrize("name", steps.SHAPES)
def test_both_models_are_of_one_size(name: str) -> None:
    """A ratio between models of different sizes would say nothing."""
    shape = steps.SHAPES[name]
    theirs, ours = steps.timm_model(shape), shape.ours()
    assert {n: p.shape for n, p in theirs.named_parameters()} == {n: p.shape for n, p in ours.named_parameters()}
    images = torch.randn(1, 3, shape.image_size, shape.image_size)
    assert theirs(images).shape == ours(images).shape == (1, shape.classes)


def test_timms_vit_is_measured_first() -> None:
    titles = [title.removeprefix("measuring ") for title, _ in measuring.tables(Settings("cuda:0"))]
    deit = [f"timm's DeiT-Ti/16, 224×224, batch {batch}" for batch in (256, 1024)]
    assert titles[:4] == [*deit, "timm's ViT-Ti/4, 32×32, batch 256", "DeiT-Ti/16, 224×224, batch 256"]
