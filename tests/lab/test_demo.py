"""The demo on a toy size: what it writes, what it reuses, what an interruption leaves."""

import io
import json
import shutil
import warnings
from html import escape
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from acutance import sites
from acutance.errors import AcutanceWarning
from acutance.io.saving import load
from acutance.lab import demo
from acutance.lab.data import Split, digits
from acutance.lab.demo import (
    VARIANTS,
    DemoConfig,
    DemoRun,
    conclude,
    new_model,
    run_demo,
    summarise,
    train_epochs,
    warm_cosine,
)
from acutance.measure.profile import MetricValue, Profile
from acutance.mitigations import spectra

TOY = DemoConfig(depth=2, dim=12, heads=2, epochs=1, batch_size=256)


def run(folder, **options):
    console = Console(record=True, width=200, file=io.StringIO())
    runs = run_demo(folder, config=options.pop("config", TOY), console=console, **options)
    return runs, console.export_text()


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> tuple[Path, dict[str, list[DemoRun]], str]:
    """A demo of one seed: its folder, its runs and what it printed. Who changes the folder takes a copy."""
    folder = tmp_path_factory.mktemp("demo") / "one"
    return folder, *run(folder)


@pytest.fixture
def copied(shown, tmp_path) -> Path:
    return Path(shutil.copytree(shown[0], tmp_path / "copy"))


def test_writes_checkpoints_profiles_and_one_page(tmp_path) -> None:
    runs, text = run(tmp_path, seeds=2)
    folders = sorted(p.name for p in tmp_path.iterdir() if p.is_dir())
    assert folders == [f"{v}-seed{s}" for v in ("neutreno-featscale", "neutreno", "plain") for s in (0, 1)]
    for name in folders:
        assert sorted(p.name for p in (tmp_path / name).iterdir()) == [
            "model.safetensors",
            "profile.json",
            "run.json",
        ]
    assert {p.name for p in tmp_path.iterdir() if p.is_file()} == {
        "report.html",
        "report.png",
        "results.json",
    }
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["accuracy"]["plain"] == [r.accuracy for r in runs["plain"]]
    assert results["verdict"] in " ".join(text.split())
    assert "±" in results["summary"][0]["accuracy %"]
    assert escape(results["verdict"]) in (tmp_path / "report.html").read_text()
    # The checkpoint is the model that was measured.
    model = load(tmp_path / "neutreno-seed1" / "model.safetensors")
    assert model.config.mitigation == "neutreno:0.6"
    assert demo.evaluate(model, digits()[1]) == runs["NeuTRENO"][1].accuracy
    profile = Profile.load(tmp_path / "neutreno-seed1" / "profile.json")
    assert profile == runs["NeuTRENO"][1].profile


def test_an_eigen_starts_from_the_weights_the_plain_model_has() -> None:
    plain, steered = new_model(TOY, 0), new_model(TOY, 0, "eigen:positive,basis=polar")
    assert steered.config.mitigation == "eigen:positive,basis=polar"
    for before, after in zip(sites.find(plain), sites.find(steered), strict=True):
        H, ours = (site.projection_weight() @ site.value_weight() for site in (before, after))
        lam = torch.linalg.eigvalsh((H + H.T) / 2)
        expected = (lam.abs() * H.norm() / lam.norm()).clamp_min(spectra.EDGE).sort().values
        torch.testing.assert_close(torch.linalg.eigvalsh(ours), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("spectrum", "crosses"), [("square", True), ("bounded", False)])
def test_training_ends_with_a_look_at_the_spectrum(spectrum, crosses) -> None:
    model = new_model(TOY, 0, f"eigen:negative,basis=polar,spectrum={spectrum}")
    model.blocks[1].attn.mitigation.psi.data.fill_(1.6)  # −2.56, or −0.83
    few = Split(*(part[:8] for part in (digits()[0].images, digits()[0].labels)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        epochs = list(train_epochs(model, few, TOY, torch.Generator().manual_seed(0)))
    assert epochs == [0]
    found = [str(warning.message) for warning in caught if warning.category is AcutanceWarning]
    assert len(found) == crosses
    assert all(message.startswith("layers 2 (λ = -2.5") for message in found)


def test_variants_start_from_the_same_weights(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(demo, "train_epochs", lambda *_: iter(()))
    run(tmp_path)
    plain, treated = (load_file(tmp_path / f"{v}-seed0" / "model.safetensors") for v in ("plain", "neutreno-featscale"))
    assert all(torch.equal(plain[key], treated[key]) for key in plain)


def test_a_second_run_reuses_and_says_so(shown, copied, monkeypatch) -> None:
    monkeypatch.setattr(demo, "train_epochs", lambda *_: pytest.fail("trained again"))
    second, text = run(copied)
    assert text.count("reusing") == 3
    assert second == shown[1]


def test_another_configuration_or_a_damaged_run_is_trained_again(copied) -> None:
    (copied / "plain-seed0" / "profile.json").write_text("{")
    (copied / "neutreno-seed0" / "run.json").write_text("[]")
    (copied / "neutreno-featscale-seed0" / "model.safetensors").unlink()
    _, text = run(copied)
    assert text.count("reusing") == 0
    _, text = run(copied)
    assert text.count("reusing") == 3
    _, text = run(copied, config=DemoConfig(depth=2, dim=12, heads=2, epochs=2, batch_size=256))
    assert text.count("reusing") == 0


def test_an_interruption_leaves_only_finished_runs(tmp_path, monkeypatch) -> None:
    trained = []
    original = demo.train_epochs

    def interrupted(*arguments):
        if trained:
            raise KeyboardInterrupt
        trained.append(1)
        yield from original(*arguments)

    monkeypatch.setattr(demo, "train_epochs", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["plain-seed0"]
    monkeypatch.setattr(demo, "train_epochs", original)
    _, text = run(tmp_path)
    assert text.count("reusing") == 1


def test_seeds_decide_the_result(shown, copied, tmp_path) -> None:
    a, (b, _) = shown[1], run(tmp_path / "b")
    assert {k: [r.accuracy for r in v] for k, v in a.items()} == {k: [r.accuracy for r in v] for k, v in b.items()}
    assert a["plain"][0].profile.readings == b["plain"][0].profile.readings
    two, _ = run(copied, seeds=2)
    assert two["plain"][1].profile.readings != two["plain"][0].profile.readings


def made_up(variant: str, accuracies: list[float], profile: Profile) -> list[DemoRun]:
    return [DemoRun(variant, seed, accuracy, profile) for seed, accuracy in enumerate(accuracies)]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ([90.0], [95.0], "raised test accuracy in % (90.00 → 95.00)"),
        ([90.0], [90.0], "did not clearly change test accuracy in %"),
        ([90.0, 91.0], [85.0, 86.0], "lowered test accuracy in % (90.50 → 85.50)"),
        ([90.0, 95.0], [95.0, 90.0], "did not clearly change test accuracy in %"),
        ([90.0, 95.0, 92.0], [96.0, 95.0, 90.0], "did not clearly change test accuracy in %"),
    ],
)
def test_the_sentence_follows_the_numbers_and_their_spread(before, after, said) -> None:
    profile = Profile((MetricValue("block", 12, "token_cosine", 0.5, 0.1, 3),))
    runs = {"plain": made_up("plain", before, profile), "NeuTRENO": made_up("NeuTRENO", after, profile)}
    sentence = conclude(runs)
    assert said in sentence
    assert "did not clearly change token cosine after the last block (0.500 → 0.500)" in sentence
    assert ("one seed" in sentence) == (len(before) == 1)


def test_every_variant_is_in_the_sentence_and_the_table(shown) -> None:
    _, runs, _ = shown
    assert all(variant in conclude(runs) for variant in VARIANTS)
    assert [row["variant"] for row in summarise(runs)] == list(VARIANTS)


def test_schedule_warms_up_and_comes_down() -> None:
    assert warm_cosine(0.0, 0.1) == 0
    assert warm_cosine(0.1, 0.1) == 1
    assert warm_cosine(1.0, 0.1) == pytest.approx(0)


def test_digits_are_split_once_and_for_all() -> None:
    train, test = digits()
    assert (len(train), len(test)) == (1433, 364)
    assert train.images.mean().abs() < 1e-5
    assert train.images.std() == pytest.approx(1, abs=1e-4)
    assert test.labels.bincount().min() >= 35
    everything = torch.cat([train.images, test.images]).flatten(1)
    assert len(torch.cat([images for images, _ in train.batches(100)])) == 1433
    assert everything.shape == (1797, 64)
