"""The measured change of a layer by parts: against hooks set by hand, in every order that blocks come in."""

from functools import partial

import numpy as np
import pytest
import torch

import acutance as ac
from acutance import sites
from acutance.explain import ChangeReader
from acutance.measure.walk import walk
from sites import hf_zoo, tiny_models

ratio = ac.metrics.hfc_lfc_frobenius


def log(tokens):
    """log HFC/LFC written out, by singular values."""
    high = tokens - tokens.mean(1, keepdim=True)
    low = tokens.shape[1] ** 0.5 * tokens.mean(1).norm(dim=-1)
    return (torch.linalg.svdvals(high).square().sum(-1).sqrt() / low).log().numpy()


def steps(*stream):
    return np.diff([log(x) for x in stream], axis=0)


def sequential(x, y, out, seen):
    return dict(zip(("attention", "mlp"), steps(x, x + y, out), strict=True))


def after_sums(x, y, out, seen, norms=("norm1", "norm2")):
    (one, normed), (two, _) = (seen[name] for name in norms)
    torch.testing.assert_close(one, x + y)
    return dict(zip(("attention", "norm1", "mlp", "norm2"), steps(x, one, normed, two, out), strict=True))


def side_by_side(x, y, out, seen):
    (attention, mlp), (last, first) = steps(x, x + y, out), steps(x, out - y, out)
    return {"attention": (attention + first) / 2, "mlp": (mlp + last) / 2}


def bare(name):
    return lambda: (hf_zoo.build(name), hf_zoo.batch(name, padded=False))


def ours(**options):
    return lambda: (tiny_models.shaken(tiny_models.vit(**options)), tiny_models.images())


def encoder(**options):
    return lambda: (tiny_models.encoder(**options), tiny_models.tokens())


def hooked(block):
    """What goes into the block and each of its modules, and comes out, by path; filled when the block runs."""
    seen = {}
    for path, module in block.named_modules():
        keep = partial(lambda path, _, args, out: seen.update({path: (args[0] if args else None, out)}), path)
        module.register_forward_hook(keep)
    return seen


# The model; the path of what puts out the attention's branch in a block; and the parts by hand.
CASES = {
    "vit": (ours(), "attn.proj", sequential),
    "vit post": (ours(norm="post"), "attn.proj", after_sums),
    "vit layer scale": (ours(layer_scale=0.5), "ls1", sequential),
    "torch pre": (encoder(norm_first=True), "dropout1", sequential),
    "torch post": (encoder(), "dropout1", after_sums),
    "gpt": (lambda: (tiny_models.gpt().double(), tiny_models.ids()), "attn.c_proj", sequential),
    "llama": (bare("llama"), "self_attn.o_proj", sequential),
    "gemma2": (bare("gemma2"), "post_attention_layernorm", sequential),
    "gpt_neox": (bare("gpt_neox"), "attention.dense", side_by_side),
    "cohere": (bare("cohere"), "self_attn.o_proj", side_by_side),
    "bert": (
        bare("bert"),
        "attention.output.dense",
        partial(after_sums, norms=("attention.output.LayerNorm", "output.LayerNorm")),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_parts_add_up_to_the_whole_and_are_those_of_hooks(name) -> None:
    build, branch, by_hand = CASES[name]
    with hf_zoo.in_float64(), sites.cached_lookup(), torch.no_grad():
        model, batch = build()
        layers = sites.layers_of(model.eval())
        readers = [ChangeReader(site, number) for site, number in layers]
        walk(model, [batch], *readers)
        for (site, _), reader in zip(layers, readers, strict=True):
            seen = hooked(site.block)
            model(**batch) if isinstance(batch, dict) else model(batch)
            (x, out), y = seen[""], seen[branch][1]
            wanted, found = by_hand(x, y, out if isinstance(out, torch.Tensor) else out[0], seen), reader.result()
            assert (list(found.parts), found.parallel) == (list(wanted), by_hand is side_by_side)
            for part, values in wanted.items():
                np.testing.assert_allclose(found.parts[part].by_sample, values, atol=1e-10)
            parts = [shift.by_sample for shift in found.parts.values()]
            np.testing.assert_allclose(np.sum(parts, 0), found.whole.by_sample, atol=1e-10)
            assert abs(found.attention.by_sample).max() > 1e-3, "the case must tell something"
