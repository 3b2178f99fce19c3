"""What the attention and the rest of a block do to HFC/LFC, against tokens read by hand."""

import json
from hashlib import sha256

import numpy as np
import pytest
import torch

from acutance.errors import AcutanceError
from acutance.io.loading import load_model
from acutance.lab.studies import layers_study
from acutance.lab.studies.layers import middle_and_range
from tiny_folders import DECLARATION, tiny, tiny_tokenizer

# Where a layer has the tokens with its attention added: what enters this module, or what this adds to what it is given.
ADDED = {"llama": "post_attention_layernorm", "bert": "attention.output"}


@pytest.fixture(params=ADDED)
def folder(request, tmp_path):
    tokenizer = tiny_tokenizer(special=request.param == "bert")
    model = tiny(request.param, vocab_size=len(tokenizer), max_position_embeddings=64)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / request.param)
    tokenizer.save_pretrained(tmp_path / request.param)
    return tmp_path / request.param


def log_ratio(tokens, mask):
    """Of each sample, by singular values in float64."""
    kept = [x[m.bool()].double() for x, m in zip(tokens, mask, strict=True)]
    means = [x.mean(0, keepdim=True).expand_as(x) for x in kept]
    sizes = [[torch.linalg.svdvals(part)[0] for part in (x - m, m)] for x, m in zip(kept, means, strict=True)]
    return torch.stack([torch.log(high / low) for high, low in sizes])


def by_hand(model, batch, leave_out):
    """(layers, 2): the mean change before and after the attention was added."""
    kind, added, counted = model.config.model_type, [], batch["attention_mask"].clone()
    if leave_out:
        counted[batch["special_tokens_mask"].bool()] = 0
        counted[:, :leave_out] = 0
    blocks = model.encoder.layer if kind == "bert" else model.layers

    def see(module, args):
        added.append(module.dense(args[0]) + args[1] if kind == "bert" else args[0])

    hooks = [block.get_submodule(ADDED[kind]).register_forward_pre_hook(see) for block in blocks]
    outputs = []
    hooks += [block.register_forward_hook(lambda *seen: outputs.append(seen[-1])) for block in blocks]
    fed = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        first = model(**fed, output_hidden_states=True).hidden_states[0]
    for hook in hooks:
        hook.remove()
    outputs = [out if isinstance(out, torch.Tensor) else out[0] for out in outputs]
    places = [log_ratio(tokens, counted) for pair in zip(added, outputs, strict=True) for tokens in pair]
    changes = torch.stack([log_ratio(first, counted), *places]).diff(dim=0)
    return changes.mean(1).view(len(blocks), 2)


@pytest.mark.parametrize("leave_out", [0, 2])
def test_a_block_is_split_where_its_attention_was_added(folder, leave_out, tmp_path, command):
    """Also with padding."""
    texts, text = tmp_path / "texts", DECLARATION.read_text().split()
    texts.mkdir()
    for n in range(22):
        (texts / f"{n:02}.txt").write_text(" ".join(text[20 * n : 20 * n + 9 + n % 5]))
    path = tmp_path / "record.json"
    words = ["lab", "layers", f"hf:{folder}", "--text", str(texts), "--batches", "5", "--windows", "2"]
    words += ["--json", str(path), "--leave-out", str(leave_out)]
    assert "5 batches of 2 windows" in " ".join(command(*words).split())
    record, loaded = json.loads(path.read_text()), load_model(f"hf:{folder}")
    every = loaded.text_batches(texts, batch=2)
    chosen = [every.samples[n] for n in (1, 3, 5, 7, 9, 12, 14, 16, 18, 20)]  # the middles of ten equal parts
    expected = torch.stack(
        [by_hand(loaded.model.eval(), every.make(chosen[n : n + 2]), leave_out) for n in range(0, 10, 2)], 2
    )
    for part, name in enumerate(("attention", "rest")):
        assert np.array([at[name] for at in record["layers"]]) == pytest.approx(expected[:, part].numpy(), abs=1e-4)
    changes = np.diff(np.log(record["stream"]["hfc_lfc_spectral"]), axis=0)
    assert changes == pytest.approx(expected.sum(1).numpy(), abs=0.1)  # the log of a mean is not the mean of the logs
    assert record["command"] == ["acutance", *words]
    assert record["layers"][0]["layer"] == 1
    digests = "".join(sha256(file.read_bytes()).hexdigest() for file in sorted(texts.iterdir()))
    assert record["sha256"] == sha256(digests.encode()).hexdigest()


def test_intervals_need_batches_and_batches_need_text(folder):
    loaded = load_model(f"hf:{folder}")
    with pytest.raises(AcutanceError, match="4 batches give no interval: take 5 or more"):
        layers_study(loaded, DECLARATION, batches=4)
    with pytest.raises(AcutanceError, match=r"windows, 5 batches of 900 need 4500"):
        layers_study(loaded, DECLARATION, batches=5, windows=900)
    assert middle_and_range([3.0, 1.0, 2.0, 9.0]) == (2.5, 1.0, 9.0)
