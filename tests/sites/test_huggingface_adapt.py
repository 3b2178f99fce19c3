"""NeuTRENO adapted to a trained model, as in Table 1 of https://arxiv.org/abs/2312.00751: load, set λ̃, fine-tune."""

import pytest
import torch
from hf_zoo import VISION
from torch.nn import functional as F

import acutance as ac

CLASSES = 4


def train(model, pixels, labels, steps):
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = F.cross_entropy(model.train()(pixels).logits, labels)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("learn", ["none", "layer", "head"])
def test_a_trained_model_is_adapted(tmp_path, learn):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    labels = torch.arange(32) % CLASSES
    pixels = torch.randn(CLASSES, 3, 16, 16)[labels] + 2 * torch.randn(32, 3, 16, 16)  # noise around one per class
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**VISION, num_labels=CLASSES))
    losses = train(model, pixels, labels, steps=30)
    assert losses[-1] < 0.8 * losses[0]
    model.save_pretrained(tmp_path)
    model = transformers.ViTForImageClassification.from_pretrained(tmp_path).eval()
    before = model(pixels).logits
    ac.mitigate(model, ac.NeuTRENO(0.4) if learn == "none" else ac.NeuTRENO(0.4, learn=learn))
    assert torch.equal(model(pixels).logits, before) == (learn != "none")  # learnt, it starts where the model was
    losses = train(model, pixels, labels, steps=15)
    assert losses[-1] < 0.7 * losses[0]
    strengths = [p for name, p in model.named_parameters() if ".mitigation." in name]
    assert [p.shape for p in strengths] == {"none": [], "layer": [(1,)] * 2, "head": [(4,)] * 2}[learn]
    assert all(strength.abs().min() > 0 for strength in strengths)
