"""Tiny models: our ViT, models with nn.MultiheadAttention, torch's own, and models as people write them."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import acutance as ac
from acutance.models import ViT

DIM, HEADS, DEPTH, BATCH, TOKENS, WORDS = 12, 2, 3, 4, 5, 23


def future(n):
    return torch.ones(n, n, dtype=torch.bool).triu(1)


def causal(n):
    return torch.zeros(n, n, dtype=torch.float64).masked_fill(future(n), float("-inf"))


HIDDEN, CAUSAL = future(TOKENS), causal(TOKENS)
BIAS = torch.randn(BATCH * HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def shaken(module, seed=0):
    """Redraw every parameter, norms and biases too, differently in every layer."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
        parameter.data.copy_(1 + noise if "norm" in name and name.endswith("weight") else noise)
    return module


def encoder(depth=DEPTH, norm=False, nested=False, dtype=torch.float64, **options):
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 16, **{"dropout": 0.0, "batch_first": True, **options})
    final = nn.LayerNorm(DIM) if norm else None
    return shaken(nn.TransformerEncoder(layer, depth, norm=final, enable_nested_tensor=nested).to(dtype))


def decoder(**options):
    layer = nn.TransformerDecoderLayer(DIM, HEADS, 16, **{"dropout": 0.0, "batch_first": True, **options})
    return shaken(nn.TransformerDecoder(layer, DEPTH).double())


def vit(seed=0, **options):
    torch.manual_seed(seed)
    sizes = {"image_size": 8, "patch_size": 4, "dim": DIM, "depth": DEPTH, "heads": 3, "num_classes": 5}
    return ViT(**sizes | options).double().eval()


def images():
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def mitigated(model, spec, by=0.3, **options):
    """Move a mitigation's parameters away from their initial values, differently in every layer."""
    handle, generator = ac.mitigate(model, spec, **options), torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if ".mitigation." in name:
            parameter.data += by * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
    return handle


class Sharper(ac.Mitigation):
    """Queries twice as long, and a bias that changes nothing."""

    times = 2

    def scores(self, q, k, call):
        return self.times * q, k, call.v.new_full((1, 1, 1, 1), 0.5)


def recorded(run, found):
    """The output of a run, and the calls that every site recorded."""
    records = []
    with ExitStack() as stack:
        for site in found:
            stack.enter_context(site.observe(records.append))
        return run(), records


def readings(profile):
    return {(r.tap, r.layer, r.metric): r.mean for r in profile.readings}


def tokens(seed=1, batch=BATCH, dtype=torch.float64):
    return torch.randn(batch, TOKENS, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inventory(model):
    """Everything in a model: classes, attributes, hooks, submodules, configurations, and parameters by identity."""
    modules = {name: (type(m), {k: repr(value) for k, value in vars(m).items()}) for name, m in model.named_modules()}
    return modules, [(name, id(p), p.requires_grad) for name, p in model.named_parameters(remove_duplicate=False)]


@contextmanager
def left_alone(model, run=None):
    """Check that nothing in the model has changed afterwards, and no bit of `run`'s output."""
    output = None if run is None else run()
    before, state = inventory(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    yield output
    assert inventory(model) == before
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0, equal_nan=True)
    assert run is None or torch.equal(run(), output)


def with_gradients(output, parameters):
    """The output, and gradients by name of a loss that weighs each of its numbers differently."""
    parameters = dict(parameters)
    for parameter in parameters.values():
        parameter.grad = None
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(output)
    (output * weights).sum().backward()
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters.items()}
    return found | {"output": output.detach()}


def in_threads(count, work):
    """Run `work` five times per number, each number in a thread, all starting together. Errors are raised here."""
    barrier, interval = threading.Barrier(count), sys.getswitchinterval()

    def run(number):
        barrier.wait()
        return [work(number) for _ in range(5)]

    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(run, range(count)))
    finally:
        sys.setswitchinterval(interval)


def leaves_of(model):
    """The model's parameters by name, as inputs for a plain model."""
    return {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in model.named_parameters()}


def padding():
    """True where a key is padding."""
    mask = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    mask[1, 3:] = mask[2, 4:] = True
    return mask


class Made(nn.Module):
    """Parts by name, and how they are run on tokens."""

    def __init__(self, run, **parts):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args, **options):
        return self.run(self, *args, **options)


class SelfAttention(Made):
    """A typical wrapper around nn.MultiheadAttention."""

    def __init__(self, **options):
        attention = nn.MultiheadAttention(DIM, HEADS, **{"batch_first": True, **options})
        super().__init__(lambda self, x: self.mha(x, x, x, need_weights=False)[0], mha=attention)


class Block(nn.Module):
    """A pre-norm block with LayerScale; `turn` makes it batch-first around an attention that is not."""

    def __init__(self, turn=False, batch_first=True):
        super().__init__()
        self.turn = turn
        self.norm1 = nn.LayerNorm(DIM)
        self.attention = SelfAttention(batch_first=batch_first)
        self.gain = nn.Parameter(torch.ones(DIM))
        self.norm2 = nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 16), nn.ReLU(), nn.Linear(16, DIM))

    def forward(self, x):
        h = self.norm1(x)
        y = self.attention(h.transpose(0, 1)).transpose(0, 1) if self.turn else self.attention(h)
        x = x + self.gain * y
        return x + self.mlp(self.norm2(x))


def blocks(*options, depth=DEPTH):
    return shaken(nn.Sequential(*(Block(*options) for _ in range(depth)))).double()


class Model(Made):
    """A backbone of blocks, with embedding, class token, final norm and head around it."""

    def __init__(self):
        parts = {"embed": nn.Linear(DIM, DIM), "blocks": blocks(), "norm": nn.LayerNorm(DIM), "head": nn.Linear(DIM, 3)}
        super().__init__(None, cls_token=nn.Parameter(torch.zeros(1, 1, DIM)), **parts)

    def forward(self, x):
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), self.embed(x)], dim=1)
        return self.head(self.norm(self.blocks(x))[:, 0])


def cross_attention():
    return nn.MultiheadAttention(DIM, HEADS, batch_first=True)


class PostNorm(Made):
    """A block whose residual stream is normed."""

    def __init__(self, run=lambda self, x: self.norm(x + self.attention(x)), **options):
        super().__init__(run, attention=SelfAttention(**options), norm=nn.LayerNorm(DIM))


def with_positions():
    """As in detection Transformers: positions are added to queries and keys only."""

    def run(self, x):
        h = self.norm(x)
        return x + self.attn(self.positions + h, self.positions + h, h)[0]

    return Made(run, attn=cross_attention(), norm=nn.LayerNorm(DIM), positions=nn.Parameter(torch.ones(TOKENS, DIM)))


def split(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def merge(u):
    return u.transpose(1, 2).flatten(2)


def by_sdpa(q, k, v):
    return merge(F.scaled_dot_product_attention(split(q), split(k), split(v), is_causal=True))


def by_matmul(q, k, v):
    logits = (split(q) @ split(k).transpose(-2, -1)) * (1.0 / (DIM // HEADS) ** 0.5)
    logits = logits.masked_fill(future(q.shape[1]), float("-inf"))
    return merge(F.dropout(F.softmax(logits, dim=-1), 0.0) @ split(v))


def by_bmm(q, k, v):
    """Heads folded into the batch."""
    q, k, v = (split(x).flatten(0, 1) for x in (q, k, v))
    logits = torch.bmm(q, k.transpose(1, 2)) / (DIM // HEADS) ** 0.5 + causal(q.shape[1])
    return merge(torch.bmm(logits.softmax(-1), v).unflatten(0, (-1, HEADS)))


def by_einsum(q, k, v):
    q, k, v = (x.unflatten(-1, (HEADS, -1)) for x in (q, k, v))
    logits = torch.einsum("bihd,bjhd->bhij", q, k) / (DIM // HEADS) ** 0.5
    logits = logits.masked_fill(future(q.shape[1]), torch.finfo(q.dtype).min)
    return torch.einsum("bhij,bjhd->bihd", logits.softmax(dim=-1), v).flatten(2)


def by_function(q, k, v):
    """torch's own function, tokens first, as fairseq's models call it; projections of its own that change nothing."""
    same = torch.eye(DIM, dtype=q.dtype)
    own = {"use_separate_proj_weight": True, "q_proj_weight": same, "k_proj_weight": same, "v_proj_weight": same}
    tokens_first, fixed = (x.transpose(0, 1) for x in (q, k, v)), (None, None, None, None, False, 0.0, same, None)
    options = {"need_weights": False, "attn_mask": future(q.shape[1]), **own}
    return F.multi_head_attention_forward(*tokens_first, DIM, HEADS, *fixed, **options)[0].transpose(0, 1)


FORMS = {"function": by_function, "sdpa": by_sdpa, "matmul": by_matmul, "bmm": by_bmm, "einsum": by_einsum}
WRITTEN = ["matmul", "bmm", "einsum"]


def joint(self, x):
    return self.c_proj(self.form(*self.c_attn(x).chunk(3, dim=-1)))


def separate(self, x, attn_mask=None):
    """A projection each for q, k and v; there may be fewer key heads."""
    parts = self.q_proj(x), self.k_proj(x), self.v_proj(x)
    q, k, v = (part.unflatten(-1, (-1, self.width)).transpose(1, 2) for part in parts)
    if k.shape[1] < q.shape[1]:
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
    return self.out_proj(merge(self.form(q, k, v, attn_mask)))


def sdpa(q, k, v, bias):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def softmax(q, k, v, bias):
    logits = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    return F.softmax(logits if bias is None else logits + bias, dim=-1).to(v.dtype) @ v


def separate_attention(form, *, dim=DIM, heads, key_heads, width):
    counts = {"q_proj": heads, "k_proj": key_heads, "v_proj": key_heads}
    parts = {name: nn.Linear(dim, count * width) for name, count in counts.items()}
    return Made(separate, **parts, out_proj=nn.Linear(heads * width, dim), form=form, heads=heads, width=width)


def pre_norm(self, x, **masks):
    x = x + self.attn(self.norm1(x), **masks)
    return x + self.mlp(self.norm2(x))


def post_norm(self, x, **masks):
    x = self.norm1(x + self.attn(x, **masks))
    return self.norm2(x + self.mlp(x))


def attention(form="sdpa", run=joint, names=("c_attn", "c_proj")):
    parts = dict(zip(names, (nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)), strict=True))
    return Made(run, **parts, form=FORMS[form], n_head=HEADS)


def block(attn, run=pre_norm, dim=DIM):
    mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
    return Made(run, norm1=nn.LayerNorm(dim), attn=attn, norm2=nn.LayerNorm(dim), mlp=mlp)


def through_blocks(self, ids):
    x = self.wte(ids)
    for layer in self.h:
        x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed and self.training else layer(x)
    return self.head(self.norm(x))


def gpt(form="sdpa", checkpointed=False, depth=DEPTH, **options):
    """A hand-written GPT."""
    torch.manual_seed(0)
    parts = {"wte": nn.Embedding(WORDS, DIM), "norm": nn.LayerNorm(DIM), "head": nn.Linear(DIM, WORDS)}
    layers = nn.ModuleList(block(attention(form, **options)) for _ in range(depth))
    return Made(through_blocks, **parts, h=layers, checkpointed=checkpointed).double()


def ids(seed=0, rows=2, count=7):
    return torch.randint(WORDS, (rows, count), generator=torch.Generator().manual_seed(seed))
