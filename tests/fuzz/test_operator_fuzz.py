"""Random operators against the matrix written out in float64: every product, entropy and spectrum is of one matrix."""

import math
from types import SimpleNamespace

import torch
from hypothesis import strategies as st
from laws import law

from acutance import AttentionOperator, metrics
from acutance.errors import AcutanceError
from attention.operator_cases import formula

TOLERANCE = {"float64": 1e-9, "float32": 2e-4, "bfloat16": 4e-2, "float16": 5e-3}
LOW = (-math.inf, torch.finfo(torch.float32).min, -1e9, -1e4)
BATCH, SIZES, SEEDS = 2, st.integers(1, 9), st.integers(0, 2**20)
MASKS = ("none", "keys", "padding", "bool", "hides", "bias")


class Operator(SimpleNamespace):
    """Arguments of an operator, its tensors by their seed; `sharpness` is that of the logits, 0 for flat ones."""

    def make(self):
        """The operator, its matrix in float64, and which rows see anything."""
        q, k, options = self.arguments()
        weights, sums = formula(q, k, **options)
        return AttentionOperator(q, k, **options), weights, sums > -math.inf

    def arguments(self):
        """Queries, keys and options."""
        generator, dtype = torch.Generator().manual_seed(self.seed), getattr(torch, self.dtype)

        def normal(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        heads, queries = self.key_heads * self.groups, self.queries or self.keys
        sharpness = min(self.sharpness, 1e4 if self.dtype == "float16" else math.inf)  # which overflows
        q = (sharpness * normal(BATCH, heads, queries, self.width)).to(dtype)
        k = normal(BATCH, self.key_heads, self.keys, self.width).to(dtype)
        options = {
            "causal": self.causal,
            "softcap": self.softcap,
            "mask": self.draw_mask(normal, heads, queries, dtype),
        }
        options |= {"sink": normal(heads).to(dtype)} if self.sink else {}
        return q, k, options

    def draw_mask(self, normal, heads, queries, dtype):
        """None, of keys or of pairs, bool or additive; additive ones hide by `low`."""
        if self.mask in ("none", "keys", "padding"):
            seen = normal(BATCH, self.keys) > -0.5
            padding = torch.arange(self.keys) < seen.sum(-1, keepdim=True)
            return {"none": None, "keys": seen, "padding": padding}[self.mask]
        shape = BATCH, heads if self.wide_mask else 1, queries if self.wide_mask else 1, self.keys
        mask, bias = normal(*shape) > -0.5, normal(*shape) * (self.mask == "bias")
        mask[:, :, 0] &= not self.hidden_row
        hidden = bias.masked_fill(~mask, self.low).to(dtype if self.half_mask else torch.float32)
        return mask if self.mask == "bool" else hidden

    @property
    def tolerance(self):
        """An error of a logit is one of its weight's logarithm."""
        return TOLERANCE[self.dtype] * max(1.0, self.sharpness / 40)

    def expected(self, A, weights):
        """The matrix; where rounding alone decides which key wins, that of the operator: still one matrix."""
        return weights if self.sharpness < 1e3 or self.dtype == "float64" else A.dense().double()


OPERATORS = st.builds(
    Operator, seed=SEEDS, dtype=st.sampled_from(list(TOLERANCE)), key_heads=st.integers(1, 3),
    groups=st.integers(1, 2), width=SIZES, keys=SIZES, queries=st.none() | SIZES,
    sharpness=st.sampled_from([0.0, 1.0, 5.0, 40.0, 1e4, 1e7]), mask=st.sampled_from(MASKS),
    low=st.sampled_from(LOW), wide_mask=st.booleans(), hidden_row=st.booleans(), half_mask=st.booleans(),
    causal=st.booleans(), softcap=st.none() | st.sampled_from([0.5, 30.0]), sink=st.booleans(),
)  # fmt: skip
SHARP = OPERATORS.filter(lambda case: case.sharpness >= 40 and case.mask in ("none", "keys"))
SQUARE = OPERATORS.filter(lambda case: case.queries is None and not case.sink)


def assert_near(found, wanted, tolerance):
    assert found.isfinite().all()
    error = ((found.double() - wanted).abs() / (1 + wanted.abs().amax())).max()
    assert error <= tolerance, f"{error:.3g} > {tolerance:.3g}: {found} instead of {wanted}"


@law(OPERATORS, 300)
def test_products_and_their_gradients_are_those_of_one_matrix(case):
    A, weights, _ = case.make()
    wanted = case.expected(A, weights)
    units, rows = (torch.eye(n, dtype=A.dtype).expand(BATCH, A.heads, -1, -1) for n in reversed(A.shape[2:]))
    products = [(A.dense(), wanted), (A @ units, wanted), ((A.T @ rows).mT, wanted)]
    if A.shape[2] == A.shape[3]:
        diagonal = wanted.diagonal(dim1=-2, dim2=-1)
        products += [(A.diagonal(), diagonal), (A.eigenvalues().sum(-1).real, diagonal.sum(-1))]
    for found, right in products:
        assert_near(found, right, case.tolerance)
    if case.dtype == "float64" and case.sharpness < 1e3:
        x = torch.arange(3.0 * A.shape[3], dtype=A.dtype).view(-1, 3).sin().expand(BATCH, A.heads, -1, 3)
        q, k, options = case.arguments()
        leaves = [each.clone().requires_grad_() for each in (q, k, x)]
        both = AttentionOperator(*leaves[:2], **options), formula(*leaves[:2], **options)[0]
        gradients = [torch.autograd.grad((each @ leaves[2]).sin().sum(), leaves) for each in both]
        for mine, plain in zip(*gradients, strict=True):
            assert_near(mine, plain, 1e-8)


@law(OPERATORS | SHARP, 600)
def test_entropies_are_those_of_the_rows(case):
    A, weights, sees = case.make()
    counts = torch.rand(BATCH, 1, A.shape[2], generator=torch.Generator().manual_seed(case.seed)) > 0.3
    found, counts = metrics.attention_entropy(A, counts[:, 0]).double(), counts & sees
    most = math.log(A.shape[3] + case.sink)
    assert ((found >= 0) & (found <= most + 1e-3)).all(), f"{found} is no entropy of at most {most}"
    weights = case.expected(A, weights)
    missing = (1 - weights.sum(-1, keepdim=True)).clamp_min(0) if case.sink else weights[..., :0]
    wanted = torch.special.entr(torch.cat([weights, missing], -1)).sum(-1)
    assert_near(found, (wanted * counts).sum(-1) / counts.sum(-1).clamp_min(1), max(1e-3, case.tolerance))


@law(SQUARE, 300)
def test_a_stationary_distribution_is_one(case):
    A, _, sees = case.make()
    weights = A.dense().double()
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)
    try:
        pi = A.stationary().double()
    except AcutanceError:
        sizes = torch.linalg.eigvals(weights).abs().sort(-1, descending=True).values
        if sees.all() and (case.keys == 1 or (1 - sizes[..., 1]).min() > 1e-3):
            raise
        return True
    assert (pi.sum(-1) - 1).abs().max() <= 1e-5, f"it sums to {pi.sum(-1)}"
    error = (torch.einsum("bhi,bhij->bhj", pi, weights) - pi).abs().sum(-1).max()
    assert error <= 2e-6, f"‖πᵀA − πᵀ‖₁ = {error}"
    return False
