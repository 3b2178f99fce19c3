"""Small models, by the packed kernels and by the operator."""

import torch
from packed_cases import DEVICE

from acutance import mitigations
from acutance.attention.kernels import packed
from acutance.models import LanguageModel, ViT


class ValueResidual(mitigations.Mitigation):
    """A((1 − ρ) v + ρ v⁰), ρ learnt per head, in all layers but the first (https://arxiv.org/abs/2410.17897)."""

    requires = ("first_values",)

    def build(self, shape):
        self.share = torch.nn.Parameter(torch.full((shape.kv_heads,), 0.5)) if shape.layer > 1 else None

    def affine(self, so_far, call):
        return so_far if self.share is None else so_far.mixed(self.share)


MITIGATIONS = {
    "plain": mitigations.Mitigation(),
    "neutreno": mitigations.parse("neutreno:0.6"),
    "learnt": mitigations.parse("neutreno:0.6,learn=head+featscale"),
    "by head": mitigations.parse("neutreno:0.6,learn=head"),
    "attnscale": mitigations.parse("attnscale"),
    "residual": ValueResidual(),
    "twice": ValueResidual() + ValueResidual(),
    "together": mitigations.parse("neutreno:0.6+attnscale+neutreno:0.2,learn=layer+attnscale") + ValueResidual(),
}


def vit(mitigation=None, image_size=16, depth=3, layers=None, **options):
    torch.manual_seed(0)
    sizes = dict(image_size=image_size, patch_size=4, dim=32, depth=depth, heads=2, num_classes=10, mlp_ratio=1)
    model = ViT(**sizes, **options)
    model.install(MITIGATIONS[mitigation or "plain"], layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or name.endswith(("gain", "share")):
                parameter.normal_(std=0.15)
    return model.to(DEVICE)


def causal_model():
    torch.manual_seed(0)
    options = dict(vocabulary=11, dim=32, depth=2, heads=2, hidden=32, cutoffs=(), dropout=0.0)
    model = LanguageModel(mitigation="neutreno:0.6+attnscale", **options).to(DEVICE)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gain"):
                parameter.normal_()
    return model


def images(size=16, count=2):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def gradients(run, model, images):
    model.zero_grad()
    torch.manual_seed(0)  # for DropPath
    run(images).square().mean().backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def by_operator(model, monkeypatch, images, dtype=torch.float64):
    """Gradients where the kernel is not asked; DropPath draws other samples in another precision."""
    with monkeypatch.context() as patch:
        patch.setattr(packed, "is_available", lambda *_: False)
        found = gradients(model.to(dtype), model, images.to(dtype))
    model.float()
    return found


def assert_equal_gradients(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, grad in theirs.items():
        scale = grad.norm().clamp_min(1e-6)
        assert (ours[name] - grad).norm() / scale < 2e-3, name  # float32 with TF32 off, against float64


def recorder(graphs):
    """A backend that keeps the graphs it is given."""

    def backend(graph, inputs):
        graphs.append(graph)
        # The interpreter cannot be compiled: there the graph is traced, forward and backward, and run as it is.
        name = "inductor" if torch.cuda.is_available() else "aot_eager"
        return torch._dynamo.lookup_backend(name)(graph, inputs)

    return backend


def kernels_in(graph):
    """How often a graph asks for the kernel, in graphs within it too: checkpoints have their own."""
    parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
    return sum("packed_attention" in str(node.target) for part in parts for node in part.graph.nodes)
