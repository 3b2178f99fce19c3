"""Helpers of the kernels' tests: the packed kernel's formula in plain PyTorch, inputs for it, and small models.

The tests run on a GPU, or on the CPU in Triton's interpreter. That needs triton and TRITON_INTERPRET=1, so `make test`
runs this folder a second time.
"""

import pytest
import torch

from acutance import mitigations
from acutance.attention.kernels import packed as kernels
from attention.operator_cases import formula
from models.small_models import seeded

CUDA = torch.cuda.is_available() and kernels.TRITON and kernels._is_known(None)
RUNS = CUDA or (kernels.INTERPRETED and kernels.TRITON)
DEVICE = "cuda" if CUDA else "cpu"
needs_kernels = pytest.mark.skipif(not RUNS, reason="needs a GPU or Triton's interpreter")
needs_gpu = pytest.mark.skipif(not CUDA, reason="needs a Hopper GPU with Triton")
# Half precision rounds A, u and the gradients once each; float32 is computed in float32.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCE) if CUDA else [torch.float32, torch.float16]  # NumPy, the interpreter's base, has no bfloat16


def require_kernels():
    """Skip a module whose imports need Triton."""
    if not RUNS:
        pytest.skip("needs a GPU or Triton's interpreter", allow_module_level=True)


def each(values):
    """A fixture that takes each of the values in turn."""
    return pytest.fixture(params=values, ids=str)(lambda request: request.param)


def random(*shape, dtype=torch.float32, size=1.0, seed=0):
    return (size * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(DEVICE, dtype)


def plain(qkv, first, strength, contrast, residual, heads, kv_heads, scale, causal=False):
    """c·A w + (1 − c)·U w + λ (v⁰ − w) with w = (1 − ρ) v + ρ v⁰, A and U as matrices, heads merged."""
    batch, tokens, packed = qkv.shape
    group, width = heads // kv_heads, packed // (heads + 2 * kv_heads)
    q, k, v = (
        part.reshape(batch, tokens, -1, width).transpose(1, 2)
        for part in qkv.split([heads * width, kv_heads * width, kv_heads * width], -1)
    )
    first = first.reshape(batch, tokens, -1, width).transpose(1, 2)
    w = (1 - residual[:, None, None]) * v + residual[:, None, None] * first
    k, w, first = (x.repeat_interleave(group, 1) for x in (k, w, first))
    A, U = (formula(*each, causal=causal, scale=scale)[0] for each in ((q, k), (0 * q, 0 * k)))
    c = contrast[:, None, None]
    u = (c * A + (1 - c) * U) @ w + strength[:, None, None] * (first - w)
    return u.transpose(1, 2).flatten(2)


def inputs(batch, tokens, heads, width, dtype=torch.float32, size=1.0, kv_heads=None):
    """q, k and v; v⁰ as a slice of another layer's projection; λ and c per head and ρ per key head; a gradient."""
    kv_heads = kv_heads or heads
    packed = (heads + 2 * kv_heads) * width
    qkv = random(batch, tokens, packed, dtype=dtype, size=size)
    first = random(batch, tokens, packed, dtype=dtype, seed=1)[..., -kv_heads * width :]
    strength, contrast, residual = random(heads, seed=2).abs(), 1 + random(heads, seed=3), random(kv_heads, seed=4)
    grad = random(batch, tokens, heads * width, dtype=dtype, seed=5)
    return qkv, first, strength, contrast, residual.sigmoid(), grad


def expected(leaves, grad, heads, kv_heads, scale, causal=False):
    """Output and gradients in float64."""
    leaves = [x.detach().double().requires_grad_() for x in leaves]
    out = plain(*leaves, heads, kv_heads, scale, causal)
    return out.detach(), torch.autograd.grad(out, leaves, grad.double())


def error(ours, theirs):
    """The relative error. For a single token the contrast's gradient is 0, and must be exactly 0."""
    found, size = (ours.double() - theirs.double()).norm(), theirs.double().norm()
    return (found / size).item() if size > 0 else found.item()


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


def vit(mitigation, image_size=16, depth=3, layers=None, **options):
    sizes = dict(image_size=image_size, patch_size=4, dim=32, depth=depth, heads=2, num_classes=10, mlp_ratio=1)
    options |= {"mitigation_layers": layers}
    return seeded("vit", MITIGATIONS[mitigation], 0.15, torch.float32, **sizes, **options).to(DEVICE)


def causal_model(mitigation):
    options = dict(vocabulary=11, dim=32, depth=2, heads=2, hidden=32, cutoffs=(), dropout=0.0)
    return seeded("language", mitigation, 0.15, torch.float32, **options).to(DEVICE)


def images(size=16, count=2):
    return random(count, 3, size, size)


def gradients(run, model, images):
    model.zero_grad()
    torch.manual_seed(0)  # for DropPath
    run(images).square().mean().backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def by_operator(model, monkeypatch, images, dtype=torch.float64):
    """Gradients without the kernel. DropPath draws other samples in another precision."""
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "is_available", lambda *_: False)
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
        # The interpreter cannot be compiled. On the CPU the graph is traced, forward and backward, and run eagerly.
        name = "inductor" if torch.cuda.is_available() else "aot_eager"
        return torch._dynamo.lookup_backend(name)(graph, inputs)

    return backend


def kernels_in(graph, name="packed_attention"):
    """How often a graph and its subgraphs (such as checkpoints) call the kernel."""
    parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
    return sum(f"acutance.{name}" in str(node.target) for part in parts for node in part.graph.nodes)
