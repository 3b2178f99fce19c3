"""Where timm is installed its ViT is what `acutance bench` divides by."""

import pytest
import torch

from acutance.bench import steps
from acutance.bench.settings import Settings

CPU = Settings("cpu")


@pytest.mark.parametrize("name", steps.SHAPES)
def test_timms_vit_is_the_baseline(name: str) -> None:
    training, inference = steps.tables(CPU, name)
    for table in (training, inference):
        *_, rows = table.rows()
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
    theirs, ours = steps._timm(shape), shape.ours()
    assert {n: p.shape for n, p in theirs.named_parameters()} == {n: p.shape for n, p in ours.named_parameters()}
    images = torch.randn(1, 3, shape.image_size, shape.image_size)
    assert theirs(images).shape == ours(images).shape == (1, shape.classes)
