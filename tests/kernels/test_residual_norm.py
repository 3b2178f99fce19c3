"""Residual sums and their norms by the kernels: against the formula in float64, and in models against plain PyTorch."""

import pytest
import torch
from graph_recorder import recorder
from torch import nn

from acutance.kernels import packed, residual_norm
from acutance.measure import measure
from acutance.models import ViT
from acutance.models.layers import DropPath

CUDA = torch.cuda.is_available() and packed.TRITON and packed._is_known(None)
DEVICE = "cuda" if CUDA else "cpu"
needs_kernels = pytest.mark.skipif(
    not (CUDA or (packed.INTERPRETED and packed.TRITON)), reason="needs a GPU or Triton's interpreter"
)
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # relative, of the whole tensor
DTYPES = list(TOLERANCE) if CUDA else [torch.float32, torch.float16]  # NumPy, the interpreter's base, has no bfloat16
LOW = torch.bfloat16 if CUDA else torch.float16


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    monkeypatch.setattr(residual_norm, "ENABLED", True)


@pytest.fixture
def few_programs(monkeypatch):
    """Three of them, each with a few tokens at a time: most go round more than once, and not equally often."""
    monkeypatch.setattr(residual_norm, "TILE", 512)
    monkeypatch.setattr(residual_norm, "PROGRAMS", 3)
    if CUDA or packed.INTERPRETED:
        from acutance.kernels import residual_norm_rows

        monkeypatch.setattr(residual_norm_rows, "FORWARD_PROGRAMS", 2)


def make_norm(width):
    norm = nn.LayerNorm(width, eps=1e-3)
    with torch.no_grad():
        norm.weight.normal_(1, 0.5)
        norm.bias.normal_()
    return norm.to(DEVICE)


def tensors(shape, dtype, branch_dtype=None):
    """x, a branch, gradients of the sum and of its norm; what lies behind the last token must not be read."""
    x, branch, *grads = (
        torch.cat([torch.randn(shape) + 0.5, torch.full((1, *shape[1:]), float("nan"))]).to(DEVICE, kind)[:-1]
        for kind in (dtype, branch_dtype or dtype, dtype, dtype)
    )
    return x.requires_grad_(), branch.requires_grad_(), *grads


def expected(x, norm, branch, keep, grads):
    """Sum, norm and gradients in float64; the norm is that of the sum as it was rounded."""
    leaves = [t.detach().double().requires_grad_() for t in (x, branch, norm.weight, norm.bias)]
    wide, other, weight, bias = leaves
    total = wide + keep.double() * other
    rounded = total + (total.to(x.dtype).double() - total).detach()
    mean, variance = rounded.mean(-1, keepdim=True), rounded.var(-1, keepdim=True, unbiased=False)
    normed = (rounded - mean) / (variance + norm.eps).sqrt() * weight + bias
    return total, normed, *torch.autograd.grad((total, normed), leaves, [g.double() for g in grads])


def error(ours, theirs):
    return ((ours.double() - theirs).norm() / theirs.norm()).item()


SHAPES = [(3, 3, 192), (3, 7, 48), (1, 5, 384), (2, 3, 4, 48)]
CASES = [(shape, dtype) for shape in SHAPES for dtype in DTYPES]


@needs_kernels
@pytest.mark.parametrize("kept", [False, True], ids=["all", "some"])
@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_the_sum_its_norm_and_all_gradients_follow_the_formula(shape, dtype, kept, few_programs):
    torch.manual_seed(0)
    x, branch, *grads = tensors(shape, dtype)
    norm = make_norm(shape[-1]).to(dtype)
    keep = torch.tensor([1.25, 0.0, 2.0], dtype=dtype, device=DEVICE)[: shape[0]].reshape(-1, *[1] * (x.ndim - 1))
    keep = keep if kept else torch.ones_like(keep)
    total, normed = residual_norm.residual_norm(x, norm, branch, keep if kept else None)
    gradients = torch.autograd.grad((total, normed), (x, branch, norm.weight, norm.bias), grads)
    assert {t.dtype for t in (total, normed, *gradients)} == {dtype}
    theirs = expected(x, norm, branch, keep, grads)
    for ours, other in zip((total, normed, *gradients), theirs, strict=True):
        assert error(ours, other) < TOLERANCE[dtype]


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_a_branch_x_itself_comes_back_with_its_gradient_added(dtype, few_programs):
    torch.manual_seed(0)
    x, branch, *grads = tensors((3, 7, 48), dtype)
    norm = make_norm(48).to(dtype)
    total, normed = residual_norm.residual_norm(x, norm)
    assert total.data_ptr() == x.data_ptr()
    gradients = torch.autograd.grad((total, normed), (x, norm.weight, norm.bias), grads)
    _, like, of_x, _, *of_norm = expected(x, norm, torch.zeros_like(branch), x.new_ones(1), grads)
    for ours, other in zip((normed, *gradients), (like, of_x, *of_norm), strict=True):
        assert error(ours, other) < TOLERANCE[dtype]


@needs_kernels
@pytest.mark.parametrize("used", ["sum", "norm"])
def test_one_of_the_two_results_may_go_unused(used, few_programs):
    torch.manual_seed(0)
    x, branch, *grads = tensors((3, 7, 48), torch.float32)
    norm = make_norm(48)
    result = residual_norm.residual_norm(x, norm, branch)[used == "norm"]
    grad = grads[used == "norm"]
    gradients = torch.autograd.grad(result, (x, branch), grad)
    both = [grad if name == used else torch.zeros_like(grad) for name in ("sum", "norm")]
    for ours, other in zip(gradients, expected(x, norm, branch, x.new_ones(1), both)[2:4], strict=True):
        assert error(ours, other) < 1e-6


@needs_kernels
def test_widest_tokens(few_programs):
    torch.manual_seed(0)
    x, branch, *grads = tensors((1, 4, 1024), torch.float32)
    norm = make_norm(1024)
    found = residual_norm.residual_norm(x, norm, branch)
    gradients = torch.autograd.grad(found, (x, branch, norm.weight, norm.bias), grads)
    for ours, other in zip((*found, *gradients), expected(x, norm, branch, x.new_ones(1), grads), strict=True):
        assert error(ours, other) < 1e-6


@needs_kernels
@pytest.mark.parametrize("stream", [torch.float32, LOW], ids=str)
def test_under_autocast_the_norm_comes_as_a_linear_layer_takes_it(stream):
    """The sum has the precision of x, the branch's gradient that of the branch."""
    torch.manual_seed(0)
    x, branch, *grads = tensors((3, 7, 48), stream, LOW)
    norm = make_norm(48)
    with torch.autocast(DEVICE, LOW):
        total, normed = residual_norm.residual_norm(x, norm, branch)
        plain_sum = x + branch
        plain = norm(plain_sum)
    assert normed.dtype == LOW
    assert torch.equal(total, plain_sum)
    torch.testing.assert_close(normed, plain.to(LOW), rtol=2 * torch.finfo(LOW).eps, atol=1e-6)
    gradients = torch.autograd.grad((total, normed), (x, branch, norm.weight), [grads[0], grads[1].to(LOW)])
    assert [g.dtype for g in gradients] == [stream, LOW, torch.float32]
    grads[1] = grads[1].to(LOW)
    theirs = expected(x, norm, branch, x.new_ones(1), grads)
    for ours, other in zip(gradients, theirs[2:5], strict=True):
        assert error(ours, other) < TOLERANCE[LOW]


@needs_kernels
def test_tokens_may_lie_apart():
    torch.manual_seed(0)
    x, branch, *grads = tensors((2, 7, 48), torch.float32)
    norm = make_norm(48)
    apart = [torch.cat([t, t], -1).detach()[..., :48].requires_grad_() for t in (x, branch)]
    assert not apart[0].is_contiguous()
    wide = [torch.cat([g, g], -1)[..., :48] for g in grads]
    ours, theirs = (
        torch.autograd.grad(residual_norm.residual_norm(leaves[0], norm, leaves[1]), leaves, given)
        for leaves, given in ((apart, wide), ([x, branch], grads))
    )
    assert all(map(torch.equal, ours, theirs))


@needs_kernels
@pytest.mark.parametrize("kept", [False, True])
def test_the_operations_keep_what_they_promise_a_compiler(kept, few_programs):
    """No input is changed or handed back, and the fakes tell shapes, dtypes and strides, whatever order inputs have."""
    x, branch, *grads = (t.detach().transpose(0, 1) for t in tensors((7, 3, 48), LOW))
    norm = make_norm(48).requires_grad_(False)
    keep = torch.tensor([1.25, 0.0, 2.0], device=DEVICE) if kept else None
    asked = ("test_schema", "test_faketensor")
    given = (x, branch, keep, norm.weight, norm.bias, 1e-3, torch.float32)
    torch.library.opcheck(residual_norm.residual_norm_forward, given, test_utils=asked)
    total, _, mean, rstd = residual_norm.residual_norm_forward(*given)
    given = (*grads, total, mean, rstd, norm.weight, keep, LOW)
    torch.library.opcheck(residual_norm.residual_norm_backward, given, test_utils=asked)


@needs_kernels
@pytest.mark.cuda
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("shape", [(1024, 64, 192), (64, 197, 192), (37, 65, 384), (8, 33, 768)], ids=str)
def test_many_tokens_on_a_gpu(shape):
    torch.manual_seed(0)
    x, branch, *grads = tensors(shape, torch.bfloat16)
    norm = make_norm(shape[-1])
    keep = (torch.rand(shape[0], 1, 1, device=DEVICE) < 0.9).to(torch.bfloat16)
    runs = []
    for _ in range(2):
        with torch.autocast(DEVICE, torch.bfloat16):
            found = residual_norm.residual_norm(x, norm, branch, keep)
        runs.append((*found, *torch.autograd.grad(found, (x, branch, norm.weight, norm.bias), grads)))
    assert all(map(torch.equal, *runs))  # the same bits every time
    for ours, other in zip(runs[0], expected(x, norm, branch, keep, grads), strict=True):
        assert error(ours, other) < TOLERANCE[torch.bfloat16]


def vit(**options):
    torch.manual_seed(0)
    chosen = dict(image_size=8, patch_size=4, dim=48, depth=3, heads=2, num_classes=10, mlp_ratio=1) | options
    model = ViT(mitigation="neutreno:0.6", **chosen)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(DEVICE)


def images(count=4):
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def gradients(run, model, autocast=False):
    """With the same random numbers at every call."""
    model.zero_grad()
    torch.manual_seed(1)
    with torch.autocast(DEVICE, LOW, enabled=autocast):
        scores = run(images())
    scores.float().square().mean().backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def calls(monkeypatch):
    """Each use of the kernels: whether there was a sum to do. Attention goes its plain way."""
    made = []
    original = residual_norm.residual_norm

    def spied(x, norm, branch=None, keep=None):
        made.append(branch is not None)
        return original(x, norm, branch, keep)

    monkeypatch.setattr(residual_norm, "residual_norm", spied)
    monkeypatch.setattr(packed, "is_available", lambda *_: False)
    return made


def plainly(model, monkeypatch, autocast=False):
    with monkeypatch.context() as patch:
        patch.setattr(residual_norm, "ENABLED", False)
        return gradients(model, model, autocast)


def assert_equal_gradients(ours, theirs, tolerance=1e-5):
    assert ours.keys() == theirs.keys()
    for name, grad in theirs.items():
        assert (ours[name] - grad).norm() / grad.norm().clamp_min(1e-6) < tolerance, name


FIRST, SUM = False, True  # the first block's first norm has no sum before it
ALL = [FIRST, SUM, SUM, SUM, SUM, SUM]


@needs_kernels
@pytest.mark.parametrize("drop_path", [0.0, 0.6])
def test_a_vit_by_the_kernels_learns_as_without_them(drop_path, monkeypatch, calls):
    model = vit(drop_path=drop_path)
    theirs = plainly(model, monkeypatch)
    assert not calls
    assert_equal_gradients(gradients(model, model), theirs)
    assert calls == ALL


@needs_kernels
@pytest.mark.parametrize("stream", ["float32", "autocast"])
def test_a_vit_under_autocast(stream, monkeypatch, calls):
    model = vit(drop_path=0.6, stream=stream)
    theirs = plainly(model, monkeypatch, autocast=True)
    assert_equal_gradients(gradients(model, model, autocast=True), theirs, 5 * TOLERANCE[LOW])
    assert calls == ALL


@needs_kernels
def test_checkpointed_blocks_do_their_own_sums(monkeypatch, calls):
    model = vit(drop_path=0.6)
    theirs = plainly(model, monkeypatch)
    model.set_grad_checkpointing()
    assert_equal_gradients(gradients(model, model), theirs)
    assert calls == [FIRST, SUM] * 3 + [FIRST, SUM] * 3  # forwards, and again backwards


@needs_kernels
@pytest.mark.parametrize(("checkpointed", "autocast"), [(False, True), (True, False)], ids=["plain", "checkpointed"])
def test_a_compiled_vit_is_one_graph_with_the_kernels_in_it(checkpointed, autocast, monkeypatch):
    monkeypatch.setattr(packed, "is_available", lambda *_: False)
    model = vit(depth=1 if checkpointed else 2, stream="autocast")
    theirs = plainly(model, monkeypatch, autocast)
    model.set_grad_checkpointing(checkpointed)
    torch._dynamo.reset()
    graphs = []
    compiled = torch.compile(model, fullgraph=True, backend=recorder(graphs))
    assert_equal_gradients(gradients(compiled, model, autocast), theirs, 5 * TOLERANCE[LOW] if autocast else 1e-5)
    parts = [part for part in graphs[0].modules() if isinstance(part, torch.fx.GraphModule)]
    targets = [str(node.target) for part in parts for node in part.graph.nodes]
    assert len(graphs) == 1
    assert sum("residual_norm_backward" in target for target in targets) == (2 if checkpointed else 4)
    assert sum("residual_norm." in target for target in targets) == (1 if checkpointed else 3)


@needs_kernels
def test_an_exported_vit_has_the_kernels_in_it(monkeypatch):
    monkeypatch.setattr(packed, "is_available", lambda *_: False)
    model = vit().eval()
    exported = torch.export.export(model, (images(),))
    assert sum("acutance.residual_norm" in str(node.target) for node in exported.graph.nodes) == 5
    torch.testing.assert_close(exported.module()(images()), model(images()))


@needs_kernels
@pytest.mark.parametrize(
    ("options", "training", "uses"),
    [
        ({"layer_scale": 0.5}, True, [FIRST] * 6),
        ({"dropout": 0.1}, True, [FIRST] * 6),
        ({"dropout": 0.1}, False, ALL),
        ({"norm": "post"}, True, []),
    ],
    ids=["layer scale", "dropout", "dropout, evaluated", "norm behind"],
)
def test_sums_with_more_in_them_are_done_plainly(options, training, uses, monkeypatch, calls):
    model = vit(**options).train(training)
    theirs = plainly(model, monkeypatch)
    assert_equal_gradients(gradients(model, model), theirs)
    assert calls == uses


@needs_kernels
def test_whoever_looks_at_a_block_finds_its_tokens(monkeypatch, calls):
    model = vit().eval()
    seen = {}
    for enabled in (False, True):
        monkeypatch.setattr(residual_norm, "ENABLED", enabled)
        handle = model.blocks[1].register_forward_hook(lambda *a, e=enabled: seen.__setitem__(e, a[-1][0]))
        model(images())
        handle.remove()
    assert calls == [FIRST, SUM] * 3
    torch.testing.assert_close(seen[True], seen[False])


@needs_kernels
def test_measuring_gives_the_same(monkeypatch, calls):
    model = vit().eval()
    found = {}
    for enabled in (False, True):
        monkeypatch.setattr(residual_norm, "ENABLED", enabled)
        found[enabled] = torch.tensor(
            measure(model, [images()], metrics="token_cosine", progress=False)["token_cosine"]
        )
    assert calls
    torch.testing.assert_close(found[True], found[False])


@needs_kernels
@pytest.mark.parametrize("where", ["norm1", "norm2"])
def test_a_hooked_norm_is_called(where, calls):
    model = vit().eval()
    shapes = []
    getattr(model.blocks[1], where).register_forward_hook(lambda *a: shapes.append(a[-1].shape))
    model(images())
    assert shapes == [(4, 5, 48)]
    assert calls == [FIRST, SUM, SUM, SUM, SUM]


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("training", [False, True])
def test_the_factor_is_what_drop_path_multiplies_by(rate, training):
    drop, x = DropPath(rate).train(training), torch.randn(50, 2, 3)
    torch.manual_seed(0)
    dropped, state = drop(x), torch.get_rng_state()
    torch.manual_seed(0)
    factor = drop.factor(x)
    assert torch.equal(torch.get_rng_state(), state)
    if rate == 0 or not training:
        assert factor is None
        assert dropped is x
    else:
        assert factor.shape == (50, 1, 1)
        assert torch.equal(x * factor, dropped)


class TestWhereTheKernelsAreAsked:
    @pytest.fixture(autouse=True)
    def anywhere(self, monkeypatch):
        monkeypatch.setattr(packed, "TRITON", True)
        monkeypatch.setattr(packed, "INTERPRETED", True)

    @pytest.mark.parametrize("dtype", packed.DTYPES, ids=str)
    def test_asked(self, dtype):
        x = torch.zeros(2, 3, 8, dtype=dtype)
        assert residual_norm.is_available(x, nn.LayerNorm(8, dtype=dtype), x)

    def test_switched_off(self, monkeypatch):
        monkeypatch.setattr(residual_norm, "ENABLED", False)
        assert not residual_norm.is_available(torch.zeros(2, 3, 8), nn.LayerNorm(8))

    @pytest.mark.parametrize(
        ("shape", "dtype", "norm"),
        [
            ((2, 3, 8), torch.float64, nn.LayerNorm(8, dtype=torch.float64)),
            ((2, 3, 8), torch.float16, nn.LayerNorm(8)),
            ((2, 3, 1025), torch.float32, nn.LayerNorm(1025)),
            ((0, 3, 8), torch.float32, nn.LayerNorm(8)),
            ((2, 3, 8), torch.float32, nn.LayerNorm((3, 8))),
            ((2, 3, 8), torch.float32, nn.LayerNorm(8, bias=False)),
            ((2, 3, 8), torch.float32, nn.LayerNorm(8, elementwise_affine=False)),
            ((2, 3, 8), torch.float32, nn.RMSNorm(8)),
        ],
    )
    def test_not_asked(self, shape, dtype, norm):
        assert not residual_norm.is_available(torch.zeros(shape, dtype=dtype), norm)

    def test_a_sum_that_would_change_the_precision_of_x(self):
        x = torch.zeros(2, 3, 8, dtype=torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            assert residual_norm.is_available(x, nn.LayerNorm(8), x)
            assert not residual_norm.is_available(x, nn.LayerNorm(8), x.float())
            assert residual_norm.is_available(x.float(), nn.LayerNorm(8), x)

    def test_a_norm_that_is_more_than_it_looks(self):
        norm = nn.LayerNorm(8)
        norm.forward = lambda x: x
        assert not residual_norm.is_available(torch.zeros(2, 3, 8), norm)

    def test_elsewhere(self, monkeypatch):
        monkeypatch.setattr(packed, "INTERPRETED", False)
        assert not residual_norm.is_available(torch.zeros(2, 3, 8), nn.LayerNorm(8))
