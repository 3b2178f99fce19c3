"""What torch.compile makes by default, once for the repository: elsewhere a backend that only traces is enough."""

import pytest
import torch

from acutance.attention.operator import AttentionOperator
from acutance.models import ViT


@pytest.mark.slow
def test_inductor_has_the_same_gradients():
    """Of a model with all that changes its weights, its attention and its features; and of the operator's product."""
    torch.manual_seed(0)
    sizes = {"image_size": 8, "patch_size": 4, "dim": 12, "depth": 2, "heads": 3, "num_classes": 5}
    mitigation = "eigen:negative,basis=householder+neutreno:0.6,learn=head+featscale"
    model = ViT(**sizes, mitigation=mitigation).double()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    images = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    keys = torch.ones(2, 7, dtype=torch.bool)
    keys[1, 5:] = False
    q, k, v = (torch.randn(2, 3, 7, 4, requires_grad=True) for _ in range(3))

    def run():
        return model(images).square().mean(), AttentionOperator(q, k, mask=keys).apply(v)

    def gradients(scores, product):
        found = torch.autograd.grad([scores, product.square().sum()], [*model.parameters(), q, k, v])
        return found[:-3], found[-3:]

    expected = run()
    torch.compiler.reset()
    found = torch.compile(run, fullgraph=True)()
    torch.testing.assert_close(found[0], expected[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)
    (steered, products), (expected_steered, expected_products) = gradients(*found), gradients(*expected)
    torch.testing.assert_close(steered, expected_steered, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(products, expected_products, rtol=1e-4, atol=1e-4)
