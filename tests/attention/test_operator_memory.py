"""Memory linear in tokens: no operation may return anything of the size of the matrix."""

import pytest
import torch
from operator_cases import KERNELS, MASKINGS, LargestTensor, assert_tensors_below
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from acutance.attention import products
from acutance.attention.operator import AttentionOperator

TOKENS = 2048


def long_case(masking: str, key_heads: int = 1, width: int = 8) -> tuple[Tensor, Tensor, dict[str, object]]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, TOKENS, width, generator=generator)
    k = torch.randn(1, key_heads, TOKENS, width, generator=generator)
    mask = torch.arange(TOKENS)[None] < TOKENS - 100 if "keys" in masking else None
    return q, k, {"mask": mask, "causal": "causal" in masking}


@pytest.fixture(autouse=True)
def _no_matrix(monkeypatch):
    monkeypatch.setattr(AttentionOperator, "dense", None)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("masking", [masking for masking in MASKINGS if masking != "full"])
def test_products_never_form_the_matrix(kernel, masking):
    q, k, options = long_case(masking)
    A = AttentionOperator(q, k, kernel=kernel, **options)
    with assert_tensors_below(TOKENS**2 // 3):
        for x in (torch.randn(1, 1, TOKENS, 9), torch.randn(1, 1, 8, TOKENS).mT):  # wide ones, and of any layout
            A @ x
        A.T @ q
        A.logsumexp()
        A.diagonal()


@pytest.mark.parametrize("kernel", ["softmax", "polynomial"])
@pytest.mark.parametrize("masking", ["none", "causal+keys"])
def test_training_and_spectra_never_form_the_matrix(kernel, masking):
    q, k, options = long_case(masking)
    q.requires_grad_(), k.requires_grad_()
    with assert_tensors_below(TOKENS**2 // 3):
        A = AttentionOperator(q / 4, k / 4, kernel=kernel, **options)
        (A @ torch.randn(1, 1, TOKENS, 8)).sum().backward(retain_graph=True)
        (A.T @ q + A.logsumexp()[..., None]).sum().backward()
        A.eigenvalues(2)
        A.stationary()


@pytest.mark.parametrize(("batch", "heads", "tokens"), [(1, 2, 500), (4, 32, 2048), (1, 16, 32768)])
def test_a_block_on_a_device_is_large_but_no_larger_than_queries_and_keys(batch, heads, tokens):
    with FakeTensorMode():
        q = torch.empty(batch, heads, tokens, 64, device="cuda")
        blocks = products.Tiles(AttentionOperator(q, q)).blocks
    rows = [block.stop - block.start for block in blocks]
    assert sum(rows) == tokens
    assert rows[0] >= min(tokens, 128)
    assert batch * heads * tokens * rows[0] <= max(products.GPU_TILE, 2 * q.numel())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_heads", [1, 2])
def test_plain_attention_is_one_call(causal, key_heads):
    # No mask, values as wide as the keys: exactly the operations of a bare SDPA, no copies but of grouped heads.
    q, k, _ = long_case("none", key_heads=key_heads, width=16)
    q, k, v = q[..., :64, :].requires_grad_(), k[..., :64, :].requires_grad_(), k[..., 64:128, :]
    with LargestTensor() as bare:
        repeated = [x if key_heads == 2 else x.repeat_interleave(2, dim=1) for x in (k, v)]
        expected = scaled_dot_product_attention(q, *repeated, is_causal=causal)
    with LargestTensor() as ours:
        out = AttentionOperator(q, k, causal=causal).apply(v)
    assert torch.equal(out, expected)
    assert ours.operations == bare.operations


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("masking", ["none", "keys", "causal"])
def test_grouped_heads_are_left_to_sdpa_only_where_flash_takes_them(device, masking, dtype, monkeypatch):
    # Anywhere else some version of PyTorch would answer with its quadratic back-end. Shapes only: no device needed.
    calls = []

    def bare(q, k, x, *_, enable_gqa, **__):
        calls.append((enable_gqa, k.size(1), x.size(1)))
        return q

    monkeypatch.setattr(products, "scaled_dot_product_attention", bare)
    monkeypatch.setattr(products, "open_rows", lambda mask, dtype: (mask, None, 0.0))
    with FakeTensorMode():
        q, k, x = (torch.empty(1, heads, 16, 8, dtype=dtype, device=device) for heads in (4, 2, 2))
        mask = torch.ones(1, 1, 1, 16, dtype=torch.bool, device=device) if masking == "keys" else None
        AttentionOperator(q, k, mask=mask, causal=masking == "causal") @ x
    left_to_sdpa = device == "cuda" and masking != "keys" and dtype == torch.bfloat16
    assert calls == [(True, 2, 2) if left_to_sdpa else (False, 4, 4)]
