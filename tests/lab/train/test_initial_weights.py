"""Starting from weights: what they were trained with is compared, said, recorded; what cannot be meant is refused."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from tiny_runs import MODEL, assert_same_bits, bits, die_in, fit, tiny

import acutance as ac
from acutance.errors import AcutanceError
from acutance.lab.tasks.language import LanguageTaskConfig
from acutance.lab.tasks.segmentation import SegmentationConfig
from acutance.lab.train import Run
from acutance.lab.train.start import described, initial_weights
from acutance.models import LanguageConfig, LanguageModel, SegmenterConfig, ViT

WORDS = {"vocabulary": 30, "dim": 8, "depth": 1, "heads": 2, "hidden": 12, "cutoffs": (5, 9)}


def saved(folder, **changes):
    torch.manual_seed(3)
    return ac.save(ViT(**replace(MODEL, **changes).to_dict()), folder / "start.safetensors")


def starting_from(path, *changes):
    return tiny(f"task.weights={path}", "loop.epochs=0.25", *changes)


def test_what_differs_is_said_and_recorded(tmp_path):
    path = saved(tmp_path, mitigation="neutreno:0.3", dropout=0.0)
    config = starting_from(path, "task.model.mitigation=neutreno:0.6", "optim.lr=0", "schedule.warmup=0")
    _, printed = fit(config, tmp_path / "run")
    words = "a ViT: mitigation neutreno:0.3 there, neutreno:0.6 here; dropout 0.0 there, 0.1 here"
    assert f"starts from {path}, {words}\n" in printed
    start = json.loads((tmp_path / "run/run.json").read_text())["start"]
    assert start["differs"] == {"mitigation": ["neutreno:0.3", "neutreno:0.6"], "dropout": [0.0, 0.1]}
    assert len(start["sha256"]) == 64
    before, after = ac.load(path), ac.load(tmp_path / "run/model.safetensors")  # nothing was learnt at a rate of 0
    assert torch.equal(after.blocks[1].attn.qkv.weight, before.blocks[1].attn.qkv.weight)


def test_the_recipe_of_a_run_is_named_and_published_weights_say_nothing(tmp_path):
    Run(tmp_path).begin(tiny(), "digits", 1)
    found = initial_weights(starting_from(saved(tmp_path)).task)
    assert described(found).endswith("a ViT of the recipe digits: the same model")
    torch.save({"model": {}}, tmp_path / "published.pth")
    save_file({"w": torch.ones(1)}, tmp_path / "other.safetensors")
    for name in ("published.pth", "other.safetensors"):
        assert "does not say what it was trained with" in described(
            initial_weights(starting_from(tmp_path / name).task)
        )


def test_an_encoder_is_compared_with_the_classifier_it_is_from(tmp_path):
    """Which has other classes and another image size: that is what an encoder is taken for."""
    sizes = {"image_size": 16, "patch_size": 2, "in_chans": 1, "dim": 8, "depth": 2, "heads": 2, "mlp_ratio": 2.0}
    model = SegmenterConfig(num_classes=11, drop_path=0.0, decoder_heads=2, **sizes)
    task = SegmentationConfig(dataset="camvid", model=model, encoder_weights=str(saved(tmp_path)))
    assert initial_weights(task)["differs"] == {"image_size": [8, 16], "dropout": [0.1, 0.0]}
    with pytest.raises(AcutanceError, match="trained with heads 2, and a model with heads 4"):
        initial_weights(replace(task, model=replace(model, heads=4)))
    saved(tmp_path, norm="post")  # the same tensors, for what a Segmenter has no choice of
    with pytest.raises(AcutanceError, match=r"norm post, and a model with norm pre .* else: start from other weights$"):
        initial_weights(task)


def test_a_language_model_is_compared_as_its_text_makes_it(tmp_path):
    """Vocabulary and cut-offs come from the text, so what the configuration says of them is no difference."""
    path = ac.save(LanguageModel(**WORDS), tmp_path / "start.safetensors")
    model = LanguageConfig(**WORDS | {"vocabulary": 267_735, "cutoffs": (5, 9, 20_000)})
    task = LanguageTaskConfig(corpus="wikitext-2", model=model, weights=str(path))
    assert initial_weights(task)["differs"] == {}
    with pytest.raises(AcutanceError, match=r"trained with cutoffs \[5, 9\], and a model with cutoffs \[5, 12\]"):
        initial_weights(replace(task, model=replace(model, cutoffs=(5, 12))))
    with pytest.raises(AcutanceError, match="holds a LanguageModel, and this run starts from a ViT"):
        initial_weights(starting_from(path).task)
    saved(tmp_path)
    with pytest.raises(AcutanceError, match="holds a ViT, and this run starts from a LanguageModel"):
        initial_weights(task)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ({"heads": 4}, "heads 4, and a model with heads 2 .*: --set task.model.heads=4"),
        ({"mitigation": "eigen:negative"}, "with eigen:negative .*An eigen is put into them"),
        ({"dim": 16}, "does not fit the model .*of another size"),
        ("nowhere.safetensors", "there is no .*nowhere.safetensors to start from .*task.weights.*: train it first"),
        ("begun", "is a folder: name the file, --set task.weights=.*begun/model.safetensors"),
        ("begun/model.safetensors", "its run is not finished. To go on"),
        ("damaged.safetensors", "is not a safetensors file, or it is damaged"),
    ],
)
def test_what_cannot_be_meant_or_is_not_there_leaves_no_run_behind(tmp_path, start, message):
    (tmp_path / "damaged.safetensors").write_bytes(b"no tensors")
    Run(tmp_path / "begun").begin(tiny(), "digits", 1)
    path = tmp_path / start if isinstance(start, str) else saved(tmp_path, **start)
    with pytest.raises(AcutanceError, match=message):
        fit(starting_from(path), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_goes_on_to_the_same_bits_when_what_it_started_from_is_gone(tmp_path):
    """Exports on the way read the file no more, either."""
    config = starting_from(saved(tmp_path), "task.model.mitigation=eigen:negative", "loop.epochs=1.5")
    fit(config, tmp_path / "whole")
    die_in(7, config, tmp_path / "cut")
    (tmp_path / "start.safetensors").unlink()
    fit(config, tmp_path / "cut", resume=True)
    assert_same_bits(bits(tmp_path / "cut"), bits(tmp_path / "whole"))
