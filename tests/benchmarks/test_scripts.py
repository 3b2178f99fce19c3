"""Every script in benchmarks/ runs at toy size, and its files say how they came about."""

import csv
import json
import runpy
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from acutance.errors import AcutanceError
from acutance.io import load_model
from acutance.lab import recipes
from acutance.lab.bench.floor import of_mlp
from acutance.lab.evaluate import Evaluation
from acutance.lab.train import Run, override
from lab.data.tiny_data_sets import picture
from tiny_folders import DECLARATION, save_bert, tiny

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
RESULTS = SCRIPTS / "results"
CPU = ["--device", "cpu"]
# By script: its options at toy size, where {} is the folder it writes to, and the variants it must find.
TOYS = {
    "explain_size": (["--dim", "48", "--heads", "4", "--head-dim", "12", "--layers", "2", "--out", "{}"], 1),
    "family": (["--only", "xsa", "featscale", "--out", "{}/family.csv"], 2),
    "host_time": ([*CPU, "--rounds", "2", "--results", "{}"], 3),
    "planting": (["--only", "one token", "--keep", "{}/kept", "--out", "{}"], 12),
    "over_training": (["--seeds", "1", "--epochs", "1", "--depth", "2", "--runs", "{}/runs", "--out", "{}"], 20),
}


@pytest.fixture
def script(monkeypatch, tmp_path):
    """Runs a script with these words; {} stands for a folder. Gives the rows of its one CSV file, if there is one."""

    def run(name, *words):
        path = SCRIPTS / f"{name}.py"
        monkeypatch.setattr(sys, "argv", [str(path), *(str(word).replace("{}", str(tmp_path)) for word in words)])
        runpy.run_path(str(path), run_name="__main__")
        found = sorted(tmp_path.glob("*.csv"))
        return list(csv.DictReader(found[0].open(newline=""))) if found else []

    return run


@pytest.mark.parametrize("name", TOYS)
def test_a_script_runs_at_toy_size(script, name, tmp_path):
    words, count = TOYS[name]
    rows = script(name, *words)
    assert len(rows) >= count
    if name not in ("family", "over_training", "planting"):
        assert f"python benchmarks/{name}.py" in rows[0]["command"]
        assert "CPU" in rows[0]["device"]
        assert torch.__version__ in rows[0]["versions"]
    for row in rows if "ratio" in rows[0] else ():
        assert float(row["ratio"] or 1) > 0, row


def test_every_script_is_run_here():
    own = {"dominance", "corruption_parity", "neutral", "plots", "rxnfp", "time_to_accuracy"}
    assert {path.stem for path in SCRIPTS.glob("*.py")} == TOYS.keys() | own


def test_a_neutral_band_is_a_spread_over_samples(script, tmp_path):
    save_bert(tmp_path / "bert")
    words = ("--text", DECLARATION, "--tokens", 32, "--seeds", 0, "--out", "{}/neutral.json")
    script("neutral", "hf:{}/bert", *words)
    (found,) = json.loads((tmp_path / "neutral.json").read_text())["models"].values()
    assert all(len(of["spread"]) > 1 and min(of["spread"]) >= 0 for of in found.values())


def test_the_sign_of_a_spectrum_decides_which_family_dominates(script, tmp_path):
    sizes = ["--seeds", "1", "--depth", "2", "--epochs", "1", "--samples", "32"]
    rows = script("dominance", "trained", *CPU, *sizes, "--out", "{}")
    shares = {(row["model"], row["state"]): float(row["smoothing_percent"]) for row in rows}
    assert all(shares["positive", state] == 100 and shares["negative", state] == 0 for state in ("random", "trained"))
    body = json.loads((tmp_path / "dominance-trained.json").read_text())
    assert [layer["layer"] for layer in body["runs"][0]["layers"]] == [1, 2]


def test_a_random_vit_on_a_folder_of_images(script, tmp_path):
    (tmp_path / "images").mkdir()
    with pytest.raises(AcutanceError, match="no file to read in"):
        script("dominance", "random", *CPU, "--images", "{}/images")
    picture(60, 40, 0).save(tmp_path / "images" / "one.png")
    sizes = ["--seeds", "1", "--depth", "2", "--dim", "24", "--heads", "3"]
    (row,) = script("dominance", "random", *CPU, *sizes, "--images", "{}/images", "--out", "{}")
    assert (row["data"], row["samples"]) == ("1 images of a folder", "1")


def test_the_floor_of_an_mlp_counts_each_tensor_of_each_product_once():
    narrow, wide, weight, flops = 65536 * 192 * 2, 65536 * 768 * 2, 192 * 768 * 2, 2 * 65536 * 192 * 768
    assert of_mlp(65536, 192, 768, 2, training=False) == [(2 * (narrow + weight), 2 * flops)]
    moved, work = (sum(column) for column in zip(*of_mlp(65536, 192, 768, 2, training=True), strict=True))
    assert (moved, work) == (6 * (narrow + weight) + 7 * wide, 6 * flops)


def test_corruptions_are_compared_with_another_packages_and_saved(script, monkeypatch, tmp_path, capsys):
    package = types.ModuleType("imagecorruptions")
    package.corrupt = lambda image, corruption_name, severity: image // severity
    monkeypatch.setitem(sys.modules, "imagecorruptions", package)
    words = ["--dataset", "digits", "--images", "6", "--corruptions", "contrast", "--save", "{}/saved"]
    script("corruption_parity", *words)
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [row["severity"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert rows[0]["change_theirs"] == "0.00"
    assert np.load(tmp_path / "saved" / "contrast.npy").shape == (30, 8, 8, 1)


def test_models_of_reactions_are_unpacked_with_their_tokens(script, tmp_path):
    """As rxnfp has them: a checkpoint with a head, a configuration without a type, a vocabulary by lines."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "C", "Cl", "c", "1", "[N+]", ">>", "%10"]
    whole, folder = tiny("bert", "AutoModelForMaskedLM", vocab_size=len(tokens)), tmp_path / "package" / "one"
    folder.mkdir(parents=True)
    torch.save(whole.state_dict(), folder / "pytorch_model.bin")
    kept = {key: value for key, value in whole.config.to_dict().items() if key not in ("model_type", "architectures")}
    (folder / "config.json").write_text(json.dumps(kept))
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n")
    script("rxnfp", "{}/package", "{}/out")
    loaded = load_model(f"hf:{tmp_path}/out/one")
    ids = loaded.tokenizer()("Clc1[N+]%10C>>O", return_tensors="pt")["input_ids"]
    assert ids.tolist() == [[2, 6, 7, 8, 9, 11, 5, 10, 1, 3]]
    with torch.no_grad():
        assert torch.equal(loaded.model.eval()(ids)[0], whole.bert(ids)[0])
    texts = loaded.text_batches(tmp_path / "out" / "reactions", tokens=40)
    assert len(list((tmp_path / "out" / "reactions").iterdir())) == 64 <= len(texts.samples)


@pytest.mark.parametrize(("kind", "source"), [("steps", "steps-32"), ("tokens", "long-tokens"), ("overview", "")])
def test_the_published_results_are_drawn(script, tmp_path, kind, source):
    (path,) = RESULTS.glob(f"bench-{source}-*.csv") if source else [RESULTS]
    script("plots", kind, path, "{}/new/picture.svg")
    assert "</svg>" in (tmp_path / "new" / "picture.svg").read_text()


def test_the_first_evaluation_that_is_as_good_counts(script, tmp_path):
    run = Run(tmp_path / "plain")
    run.begin(override(recipes.load("digits"), ["loop.seed=3"]), "digits", 1)
    run.write_result({"step": 40, "scores": {"top1": 71.0}, "headline": "top1", "best": None})
    log = [{"step": at, "seconds": float(at), "images/s": 200.0, "val/top1": top1} for at, top1 in ((8, 60), (12, 72))]
    (run.folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    Evaluation(
        split="test", weights="last", settings=(), scores={"top1": 70.5}, headline="top1", higher_is_better=True,
        model="", precision="float32", command=(), evaluated="", versions={}, hardware={}, git=None,
    ).save(run.folder)  # fmt: skip
    (row,) = script("time_to_accuracy", "{}/plain", "--reach", 60, "--reach", 71.5, "--reach", 80, "--out", "{}/t.csv")
    assert (row["seconds_to_60"], row["seconds_to_71.5"], row["seconds_to_80"]) == ("8.0", "12.0", "")
    assert (row["seconds"], row["test_top1"], row["held_out_top1"], row["seed"]) == ("12.0", "70.50", "72.00", "3")
    record = json.loads(run.record_path.read_text())
    run.record_path.write_text(json.dumps({**record, "sessions": 2 * record["sessions"]}))
    with pytest.raises(AcutanceError, match="interrupted"):
        script("time_to_accuracy", "{}/plain")
