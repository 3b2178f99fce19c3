"""A diagnosis: what it says fits a screen, survives a file and leaves the model alone; its advice can be run."""

import shlex
from dataclasses import replace

import numpy as np
import pytest
import torch
import typer.main
from torch import nn

import acutance as ac
from acutance import __main__ as command_line
from acutance.diagnose import Diagnosis
from acutance.diagnose.findings import DETECTORS, detect
from acutance.diagnose.readings import Readings
from acutance.errors import AcutanceError
from sites.tiny_models import left_alone
from tiny_folders import DECLARATION, save_bert, tiny

IMAGES = {"image_size": 8, "patch_size": 2, "in_chans": 1, "dim": 24, "heads": 3, "num_classes": 4}


@pytest.fixture(scope="module")
def diagnosis() -> Diagnosis:
    """Of a new model, whose attention is even and whose branches are constant."""
    torch.manual_seed(0)
    model = ac.models.ViT(depth=4, **IMAGES).train()
    images, told = torch.randn(8, 1, 8, 8), {"name": "runs/new <b>", "options": "--limit 8"}
    with left_alone(model):
        found = ac.diagnose(model, images.split(4), progress=False, context=told)
    assert model.training
    return found


def test_it_fits_a_screen_and_says_the_worst_first(diagnosis, monkeypatch):
    lines = str(diagnosis).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 60
    assert diagnosis.severity == diagnosis.findings[0].severity == "warning"
    assert diagnosis.headline.startswith("No over-smoothing")
    assert "even attention" in diagnosis.headline
    healthy = replace(diagnosis, findings=())
    assert (healthy.severity, len(str(healthy).splitlines()) < 6) == ("ok", True)


def test_it_survives_a_file_and_a_page(diagnosis, tmp_path):
    same = Diagnosis.load(diagnosis.save(tmp_path / "d.json"))
    assert str(same) == str(diagnosis)
    assert same.findings == diagnosis.findings
    assert same.to_json() == diagnosis.to_json()
    assert same.spectrum.layers[0].layer == 1
    assert same.profile["token_cosine", "block"].tolist() == diagnosis.profile["token_cosine", "block"].tolist()
    html = diagnosis._repr_html_()
    assert "new &lt;b&gt;" in html
    assert "<b>" not in html.replace(f"<p><b>{diagnosis.headline}</b></p>", "")
    pytest.importorskip("vl_convert")
    page = diagnosis.to_html(tmp_path / "d.html").read_text()
    assert diagnosis.headline in page
    assert "even attention" in page


def test_what_is_advised_is_a_command_that_exists(diagnosis):
    """Every detector's advice is parsed by the command line; options that do not exist are an error."""
    commands = typer.main.get_command(command_line.app)
    advised = {finding.name: finding.advice for finding in diagnosis.findings}
    advised |= {name: text for name, text in every_advice().items() if name not in advised}
    assert advised.keys() >= DETECTORS.keys()
    for text in advised.values():
        program, verb, *words = shlex.split(text.format(model="runs/new", data="--limit 8"))
        assert program == "acutance"
        commands.commands[verb].make_context(verb, words)


def every_advice() -> dict[str, str]:
    """Of readings that are wrong in every way."""
    heads = {
        name: np.full((4, 2), value) for name, value in {"own": 1.0, "evenness": 1.0, "top": 1.0, "first": 1.0}.items()
    }
    heads |= {"head_share": np.zeros((4, 2)), "head_twin": np.ones((4, 2))}
    curves = {"cosine": np.linspace(0, 1, 5), "branch_residual": np.zeros(4), "pooled_cosine": np.ones(5)}
    curves |= {"pooled_rank": np.ones(5), "norm_outlier": np.full(4, 9.0), "outlier_first": np.zeros(4)}
    curves |= {"patch_drift": np.array([0.1, 0.1, 0.9, 0.1]), "influence": np.zeros(4)}
    curves |= {"tendency": -np.ones(4)}
    facts = {"samples": 9, "tokens": 9, "causal": False, "images": True}
    found = [detect(name, Readings({**curves, **heads}, facts)) for name in DETECTORS]
    return {finding.name: finding.advice for finding in found}


def test_models_of_many_kinds_are_diagnosed():
    """Tied layers, causal attention, an encoder by part, blocks whose attention nobody knows, one sample."""
    torch.manual_seed(0)
    ids = {"input_ids": torch.randint(0, 30, (1, 9))}
    albert = ac.diagnose(tiny("albert", num_hidden_layers=3).eval(), [ids], progress=False)
    assert albert.readings.layers == 3
    llama = ac.diagnose(tiny("llama").eval(), [ids], progress=False)
    assert llama.readings.facts["causal"]
    both = ids | {"decoder_input_ids": ids["input_ids"]}
    t5 = ac.diagnose(tiny("t5").eval(), [both], part="encoder", progress=False)
    assert t5.context["part"] == "encoder"
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    configs = {
        "text_config": {**sizes, "vocab_size": 30},
        "vision_config": {**sizes, "image_size": 16, "patch_size": 8},
    }
    clip, pixels = tiny("clip", **configs).eval(), {"pixel_values": torch.randn(1, 3, 16, 16)}
    for part, images in {"text_model": False, "vision_model": True}.items():
        found = ac.diagnose(clip, [ids | pixels], part=part, progress=False)
        assert ("patch_drift" in found.readings, found.readings.facts["images"]) == (images, images)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mix = nn.LayerNorm(6), nn.Linear(6, 6)

        def forward(self, x):
            return x + self.mix(self.norm(x))

    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    mixer = ac.diagnose(Mixer(), [torch.randn(4, 9, 6)], progress=False)
    assert mixer.spectrum is None
    assert "head" not in mixer.headline
    with pytest.raises(AcutanceError, match="got no batches"):
        ac.diagnose(Mixer(), [], progress=False)


def test_the_command_reads_prints_and_writes(tmp_path, monkeypatch, capsys):
    save_bert(tmp_path / "bert")
    words = [
        f"hf:{tmp_path / 'bert'}",
        "--text",
        str(DECLARATION),
        "--limit",
        "6",
        "--prune",
        "1",
        "--json",
        str(tmp_path / "d.json"),
    ]
    monkeypatch.setattr("sys.argv", ["acutance", "diagnose", *words])
    with pytest.raises(SystemExit) as stopped:
        command_line.run()
    printed = capsys.readouterr()
    assert not stopped.value.code, printed.err
    found = Diagnosis.load(tmp_path / "d.json")
    assert found.headline.split()[0] in printed.out
    assert f"without layer {found.removals[0].layers[0]}: " in printed.out
    assert f"--text {DECLARATION} --limit 6" in found.findings[0].advice
