"""NeuTRENO adapted to a trained model, as in Table 1 of https://arxiv.org/abs/2312.00751: load, set λ̃, fine-tune."""

import pytest
import torch
from hf_zoo import VISION
from torch.nn import functional as F

import acutance as ac

CLASSES = 4


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a tiny ViT that was trained for a few steps."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**VISION, num_labels=CLASSES))
    losses = train(model, steps=30)
    assert losses[-1] < 0.8 * losses[0]
    folder = tmp_path_factory.mktemp("trained")
    model.save_pretrained(folder)
    return folder


def load(folder):
    from transformers import ViTForImageClassification

    return ViTForImageClassification.from_pretrained(folder)


def images():
    """Noise around one picture per class."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(32) % CLASSES
    pictures = torch.randn(CLASSES, 3, 16, 16, generator=generator)
    return pictures[labels] + 2 * torch.randn(32, 3, 16, 16, generator=generator), labels


def train(model, steps):
    pixels, labels = images()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model.train()(pixels).logits, labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def test_a_constant_strength(trained):
    model, pixels = load(trained), images()[0]
    before = model(pixels).logits
    ac.mitigate(model, ac.NeuTRENO(0.4))
    assert not torch.allclose(model(pixels).logits, before, atol=1e-3)
    losses = train(model, steps=15)
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("learn", ["layer", "head"])
def test_a_learnt_strength_starts_where_the_model_was(trained, learn):
    model, pixels = load(trained), images()[0]
    before = model.eval()(pixels).logits
    ac.mitigate(model, ac.NeuTRENO(0.4, learn=learn))
    assert torch.equal(model(pixels).logits, before)
    losses = train(model, steps=15)
    assert losses[-1] < 0.7 * losses[0]
    strengths = [p for name, p in model.named_parameters() if ".mitigation." in name]
    assert len(strengths) == 2
    assert all(strength.shape == ((4,) if learn == "head" else (1,)) for strength in strengths)
    assert all(strength.abs().min() > 0 for strength in strengths)
