"""Mamba, Mamba-2 and gated delta rules: what is read is what the model computes, from its own weights, in float64."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import acutance as ac
from acutance import AttentionOperator
from acutance import sites as found_in
from acutance.errors import AcutanceError, NoSitesError, SignedRowsError
from acutance.measure.walk import Visitor, walk
from acutance.sites.scans import SCANS, ScanSite, scan_of
from sites import hf_zoo

PLAIN = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 60, "state_size": 6}
HYBRID = hf_zoo.DECODER | {"num_hidden_layers": 3, "head_dim": 8}
TYPES = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 6}
DELTA = HYBRID | TYPES | DELTA | hf_zoo.EXPERTS | {"num_experts": 2, "moe_intermediate_size": 16}
SSD = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 6, "mamba_chunk_size": 4}
MODELS = {
    "Mamba": PLAIN,
    "FalconMamba": PLAIN,
    "Mamba2": PLAIN | {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4, "time_step_limit": (0.6, 0.8)},
    "Jamba": HYBRID | {"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 2} | hf_zoo.EXPERTS,
    "Bamba": HYBRID | SSD | {"attn_layer_indices": [1]},
    "Qwen3Next": DELTA | {"shared_expert_intermediate_size": 16},
    "Qwen3_5Text": DELTA,
    "KimiLinear": DELTA | {"linear_num_heads": 4, "linear_head_dim": 8, "num_key_value_heads": 4},
}
PADDING = {"none": None, "left": [[1] * 9, [0] * 4 + [1] * 5], "right": [[1] * 9, [1] * 5 + [0] * 4]}


def build(name):
    model = hf_zoo.tiny(f"{name}Model", **MODELS[name]).double()
    for parameter in model.parameters():
        parameter.data += (0.1 if parameter.ndim == 1 else 0.25) * torch.randn_like(parameter)
    return model


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return build(request.param)


def in_float64(model, monkeypatch):
    """Have the model's layers, which compute in float32 whatever their weights are, compute in float64."""
    double = SimpleNamespace(**vars(torch) | {"float32": torch.float64})
    for module in {sys.modules[type(part).__module__] for part in model.modules()}:
        if ".modeling_" in module.__name__:
            monkeypatch.setattr(module, "torch", double)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def batch(padding="none"):
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids} | ({} if PADDING[padding] is None else {"attention_mask": torch.tensor(PADDING[padding])})


def observed(model, given):
    """The calls of the layers with a scan, by the paths of their mixers."""

    class Reader(Visitor):
        def __init__(self):
            self.needs, self.calls = {"attend": range(99)}, {}

        def attend(self, layer, call):
            if call.A.kernel == "scan":
                self.calls[call.name] = call

    walk(model, [given], reader := Reader())
    return reader.calls


def convolved(mixer, x, mask, bias):
    """The causal convolution and SiLU of (batch, tokens, channels), masked afterwards where the mixer does so."""
    x, width = x.mT, mixer.conv1d.weight.shape[-1]
    x = F.silu(F.conv1d(F.pad(x, (width - 1, 0)), mixer.conv1d.weight, bias, groups=x.shape[1])).mT
    return x * mask


def decayed(fallen):
    """exp(fallen_i − fallen_j) for j ≤ i, else zero; fallen is (batch, heads, tokens, …)."""
    later = torch.ones(2 * [fallen.shape[2]]).triu(1).bool().view(*2 * [fallen.shape[2]], *[1] * (fallen.ndim - 3))
    return (fallen[:, :, :, None] - fallen[:, :, None]).masked_fill(later, -torch.inf).exp()


def by_hand_mamba(mixer, x, mask):
    x, gate = mixer.in_proj(x * mask).chunk(2, -1)
    x = convolved(mixer, x, mask, mixer.conv1d.bias)
    dt, B, C = mixer.x_proj(x).split([mixer.time_step_rank, 6, 6], -1)
    if type(mixer).__name__.startswith("Falcon"):
        dt, B, C = (t * (t.square().mean(-1, keepdim=True) + mixer.rms_eps).rsqrt() for t in (dt, B, C))
    dt = F.softplus(mixer.dt_proj(dt)).mT
    decay = decayed((dt[..., None] * -mixer.A_log.exp()[:, None]).cumsum(2))
    A = torch.einsum("bis,bjs,bdijs,bdj->bdij", C, B, decay, dt)
    u = torch.einsum("bdij,bjd->bid", A, x)
    return A, x.mT[..., None], mixer.out_proj((u + mixer.D * x) * F.silu(gate))


def by_hand_mamba2(mixer, x, mask):
    gate, x, dt = mixer.in_proj(x * mask).split([64, 64 + 2 * 2 * 6, 8], -1)
    x, B, C = convolved(mixer, x, mask, mixer.conv1d.bias).split([64, 12, 12], -1)
    B, C = (t.unflatten(-1, (2, 6)).transpose(1, 2).repeat_interleave(4, 1) for t in (B, C))
    dt, v = F.softplus(dt + mixer.dt_bias).clamp(0.6, 0.8).mT, x.unflatten(-1, (8, 8)).transpose(1, 2)
    A = C @ B.mT * decayed((dt * -mixer.A_log.exp()[:, None]).cumsum(2)) * dt[:, :, None]
    u = (A @ v + mixer.D[:, None, None] * v).transpose(1, 2).flatten(2) * F.silu(gate)
    u = u * (u.square().mean(-1, keepdim=True) + mixer.norm.variance_epsilon).rsqrt()
    return A, v, mixer.out_proj(u * mixer.norm.weight)


def by_hand_delta_rule(mixer, x, mask):
    q, k, v, z = mixer.in_proj_qkvz(x * mask).unflatten(-1, (2, -1)).split([8, 8, 12, 12], -1)
    b, a = mixer.in_proj_ba(x * mask).unflatten(-1, (2, -1)).chunk(2, -1)
    q, k, v = convolved(mixer, torch.cat([t.flatten(2) for t in (q, k, v)], -1), 1, None).split([16, 16, 24], -1)
    q, k = (t.unflatten(-1, (2, 8)).transpose(1, 2).repeat_interleave(2, 1) for t in (q, k))
    q, k = (t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for t in (q, k))
    v, beta = v.unflatten(-1, (4, 6)).transpose(1, 2), b.flatten(2).sigmoid().mT
    decay = decayed((-mixer.A_log.exp() * F.softplus(a.flatten(2) + mixer.dt_bias)).mT.cumsum(2))
    erased = torch.eye(9) + (beta[..., None] * (k @ k.mT) * decay).tril(-1)
    A = (8**-0.5 * q @ k.mT * decay) @ erased.inverse() @ torch.diag_embed(beta)
    u = (A @ v).transpose(1, 2)
    u = mixer.norm.weight * u * (u.square().mean(-1, keepdim=True) + mixer.layer_norm_epsilon).rsqrt()
    return A, v, mixer.out_proj((u * F.silu(z.reshape(2, 9, 4, 6))).flatten(2))


BY_HAND = {
    "Mamba": by_hand_mamba,
    "FalconMamba": by_hand_mamba,
    "Mamba2": by_hand_mamba2,
    "Qwen3Next": by_hand_delta_rule,
}


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", BY_HAND)
@torch.no_grad()
def test_the_matrix_is_the_one_made_by_hand_and_gives_the_layers_output(name, padding, monkeypatch):
    model, given = build(name), batch(padding)
    in_float64(model, monkeypatch)
    mask = given.get("attention_mask", torch.ones(2, 9))[..., None].double()
    calls = observed(model, given)
    assert len(calls) == 2
    for path, call in calls.items():
        A, v, y = BY_HAND[name](model.get_submodule(path), call.x, mask)
        for mine, theirs in ((call.A.dense(), A), (call.values, v), (call.branch, y)):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    if padding == "left":  # padding neither gives nor takes
        alone = observed(model, {"input_ids": given["input_ids"][1:, 4:]})
        for path, call in calls.items():
            torch.testing.assert_close(call.A.dense()[1:, :, 4:, 4:], alone[path].A.dense(), rtol=1e-10, atol=1e-12)
            assert not call.values[1, :, :4].any() or not call.A.dense()[1, :, :, :4].any()


@torch.no_grad()
def test_products_are_what_the_models_own_function_gives(model, monkeypatch):
    """Also where an architecture norms or scales what goes into it. The skip D and the gate z come after A."""
    mixer = next(site.attention for site, _ in found_in.readable_layers(model) if isinstance(site, ScanSite))
    (name, scope), given = scan_of(mixer), []
    in_float64(model, monkeypatch)
    read = SCANS[name]
    monkeypatch.setitem(SCANS, name, lambda arguments: (given.append(arguments), read(arguments))[1])
    calls = observed(model, batch())
    assert len(given) == len(calls) == 2
    for call, arguments in zip(calls.values(), given, strict=True):
        out = scope[name](**{key: value for key, value in arguments.items() if key != "kwargs"})
        out = out[0] if isinstance(out, tuple) else out
        skip, gate, u = arguments.get("D"), arguments.get("z"), call.A @ call.values
        u = u if skip is None else u + skip.view(1, -1, 1, 1) * call.values
        u = u if gate is None else u * F.silu(gate)[..., None]
        torch.testing.assert_close(u, out[..., None] if out.ndim == 3 else out.transpose(1, 2), rtol=1e-9, atol=1e-12)


def test_observing_changes_nothing_and_leaves_nothing_behind(model):
    before = model(**batch())[0]
    outputs, layers = [], found_in.readable_layers(model)
    scopes = [scan_of(site.attention) for site, _ in layers if isinstance(site, ScanSite)]
    functions = [scope[name] for name, scope in scopes]
    hook = model.register_forward_hook(lambda _, __, output: outputs.append(output[0]))
    profile = ac.measure(model, [batch()], tap=["block", "attention", "values"], metrics="all", progress=False)
    hook.remove()
    assert torch.equal(outputs[0], before)
    assert [scope[name] for name, scope in scopes] == functions
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    numbers = [number for _, number in layers]
    softmax = [number for site, number in layers if not isinstance(site, ScanSite)]
    assert profile.layers("token_cosine", "attention") == profile.layers("head_cosine") == numbers
    assert profile.layers("attention_cosine") == [number for number in numbers if number not in softmax][1:]
    assert ("attention_entropy" in profile.metrics) == bool(softmax)
    if softmax:
        read = ac.measure(model, [batch()], metrics=["attention_entropy"], progress=False)
        assert read.layers("attention_entropy") == softmax == [2]
    alone = {"input_ids": batch()["input_ids"][:1]}
    maps, calls = ac.attention_maps(model, alone, layers=numbers), list(observed(model, alone).values())
    assert [*maps] == numbers
    np.testing.assert_array_equal(maps[numbers[-1]], calls[-1].A.dense()[0].float())


def test_what_scans_do_not_have_is_refused():
    mamba, qwen = build("Mamba"), build("Qwen3Next")
    for refused in (ac.explain, lambda model: ac.mitigate(model, "neutreno:0.6"), found_in.find):
        with pytest.raises(NoSitesError, match=r"MambaModel mixes tokens by scans, which have no softmax.*: measure"):
            refused(mamba)
    with pytest.raises(SignedRowsError, match="attention_entropy needs rows"):
        ac.measure(mamba, [batch()], metrics=["token_cosine", "attention_entropy"], progress=False)
    assert ac.mitigate(qwen, "attnscale").layers == (1,)  # of those that attend
    packed = batch() | {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2)}
    with pytest.raises(AcutanceError, match="documents see each other"):
        ac.measure(qwen, [packed], metrics="token_cosine", progress=False)


def linear_attention(q, k, v):
    """Causal linear attention with φ = elu + 1, as anybody may write it."""
    q, k = F.elu(q) + 1, F.elu(k) + 1
    weights = (q @ k.mT).tril()
    return weights @ v / weights.sum(-1, keepdim=True)


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.times = nn.Linear(8, 24), 1

    def forward(self, x):
        for _ in range(self.times):
            u = linear_attention(*self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4))
        return x + u.transpose(1, 2).flatten(2)


def test_a_function_of_ones_own_is_read_once_it_is_known(monkeypatch):
    def read(given):
        return AttentionOperator(given["q"], given["k"], kernel="linear", causal=True), given["v"]

    model, x = nn.Sequential(*(Linear() for _ in range(3))).double(), torch.randn(4, 9, 8).double()
    monkeypatch.setitem(SCANS, "linear_attention", read)
    profile = ac.measure(model, [x], metrics=["attention_entropy", "nonlocal_energy"], progress=False)
    q, k, _ = (F.elu(model[0].qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)) + 1).unbind()
    weights = (q @ k.mT).tril()
    entropy = torch.special.entr(weights / weights.sum(-1, keepdim=True)).sum(-1).mean()
    assert profile["attention_entropy"][0] == pytest.approx(entropy.item())
    model[1].times = 2
    with pytest.raises(AcutanceError, match=r"1 \(Linear\) called linear_attention 2 times in one pass"):
        ac.measure(model, [x], metrics="attention_entropy", progress=False)
