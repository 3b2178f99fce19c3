"""Recipes keep what they promise: documented, JSON-able, and with the published settings."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from acutance.lab import recipes
from acutance.lab.data.augment import DEIT
from acutance.lab.train import Config, override
from acutance.lab.train.run import default_folder

# Restated from the papers and their public code, apart from the recipes.
PUBLISHED = {
    "deit_tiny": """task.model.dim=192 task.model.heads=3 task.model.depth=12 task.model.drop_path=0.1 task.repeats=3
        task.augment.rand_layers=2 task.augment.rand_magnitude=9.0 task.augment.rand_magnitude_std=0.5
        task.augment.mixup=0.8 task.augment.cutmix=1.0 task.augment.erase=0.25 task.augment.smoothing=0.1
        optim.name=adamw optim.lr=1e-3 optim.weight_decay=0.05 schedule.warmup=5 schedule.start=1e-6
        schedule.final=1e-5 schedule.per=epoch schedule.warmup_inside=true loop.epochs=300 loop.batch_size=1024
        loop.ema=null""",
    "deit_small": "task.model.dim=384 task.model.heads=6 loop.epochs=300 optim.lr=1e-3",
    "deit_tiny_symmetric": "task.model.attention=symmetric loop.epochs=300",
    "deit_tiny_adapt": "task.model.mitigation=neutreno:0.6 loop.epochs=100",
    "cifar10_kernel": "task.model.depth=12 task.dataset=cifar10",
    "wikitext103": """task.length=256 task.test_stride=1 optim.name=adam optim.lr=2.5e-4 optim.clip=0.25
        schedule.final=0.0 schedule.warmup_inside=true loop.batch_size=96""",
    "ade20k": """task.model.image_size=512 task.model.drop_path=0.1 task.model.decoder_depth=2 optim.name=sgd
        task.model.dim=192 task.model.depth=12 task.windows.short_side=512 task.windows.size=512
        task.model.decoder_dropout=0.1 task.windows.stride=480 optim.lr=1e-3 optim.momentum=0.9 optim.weight_decay=0.0
        schedule.name=poly schedule.power=0.9 schedule.final=1e-5 loop.epochs=64 loop.batch_size=8""",
}


def commands(name):
    """The lines of a recipe's docstring that are commands, taken apart."""
    lines = recipes.RECIPES[name].__doc__.splitlines()
    return [shlex.split(line) for line in lines if line.startswith("        ")]


@pytest.mark.parametrize("name", recipes.names())
def test_a_recipe_says_what_to_expect_is_plain_data_and_takes_a_mitigation(name):
    words = recipes.RECIPES[name].__doc__
    assert recipes.summary(name).endswith(".")
    assert f"acutance train {name}" in words
    assert "Not measured here yet" in " ".join(words.split()) or "Expect" in words
    assert "Needs " in words  # what data and hardware
    assert "Time: " in words
    config = recipes.load(name)
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert override(config, ["task.model.mitigation=neutreno:0.6"]).task.model.mitigation == "neutreno:0.6"


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings(name):
    config = recipes.load(name)
    assert override(config, PUBLISHED[name].split()) == config
    assert recipes.load("cifar100").task.augment == replace(DEIT, crop_pad=4)


def test_wikitext_takes_half_a_million_steps():
    """From the words of WikiText-103's training file, in 96 columns, as the loop counts."""
    per_epoch = (103_227_021 // 96 - 1) // 256
    config = recipes.load("wikitext103")
    assert round(config.loop.epochs * per_epoch) == 500_000
    assert config.schedule.warmup * per_epoch == pytest.approx(2_000)


@pytest.mark.parametrize("name", recipes.names())
def test_commands_of_a_recipe_can_follow_one_another(name):
    """Different runs lie in different folders, and what is evaluated is one of them."""
    runs = []
    for words in (words for words in commands(name) if "train" in words):
        plain = recipes.load(recipe := words[words.index("train") + 1])
        config = override(plain, [words[i + 1] for i, word in enumerate(words) if word == "--set"])
        runs.append((config, default_folder(recipe, plain, config)))
    assert runs
    assert all(words[1] in ("train", "evaluate") or words[0] == "torchrun" for words in commands(name))
    for config, folder in runs:
        assert all((config == other) == (folder == place) for other, place in runs)
    evaluated = {Path(words[2]) for words in commands(name) if words[1] == "evaluate"}
    assert evaluated <= {folder for _, folder in runs}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ("", "digits-seed0"),
        ("loop.seed=3 loop.epochs=20 task.data_dir=/data loop.log_every=7 loop.compile=true", "digits-seed3"),
        ("task.model.mitigation=neutreno:0.6,learn=head+featscale", "digits-neutreno-0.6,learn=head+featscale-seed0"),
        ("optim.lr=0.1 task.fraction=0.1", "digits-fraction=0.1,lr=0.1-seed0"),
        ("task.weights=/some/where/deit_tiny.pth", "digits-weights=deit_tiny-seed0"),
        ("task.model.mitigation_layers=[1,2]", "digits-mitigation_layers=1,2-seed0"),
    ],
)
def test_a_run_is_called_by_what_was_changed(changes, expected):
    plain = recipes.load("digits")
    assert default_folder("digits", plain, override(plain, changes.split())) == Path("runs") / expected
