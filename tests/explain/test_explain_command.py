from pathlib import Path

import pytest
from spectrum_worlds import small_vit
from typer.testing import CliRunner

from acutance.__main__ import app
from acutance.errors import AcutanceError
from acutance.explain import Spectrum
from acutance.io.saving import save


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return save(small_vit(depth=2, num_classes=10), tmp_path_factory.mktemp("run") / "m.safetensors")


def run(*arguments: object) -> None:
    done = CliRunner().invoke(app, ["explain", *map(str, arguments)])
    if done.exception is not None:
        raise done.exception


def test_options_reach_explain(checkpoint: Path, tmp_path: Path) -> None:
    options = ["--data", "digits", "--prefix", "out", "--norm", "ignore", "--no-whole", "--json"]
    run(checkpoint, *options, tmp_path / "s.json")
    found = Spectrum.load(tmp_path / "s.json")
    assert found.context["prefix"] == "1 prefix tokens out"
    assert found.context["norm"] == "pre-norm weight γ: left out"
    assert [layer.deciding for layer in found.layers] == [None, None]
    run(checkpoint, "--whole", "--json", tmp_path / "w.json")
    assert all(layer.eigenvalues is not None for layer in Spectrum.load(tmp_path / "w.json").layers)


@pytest.mark.parametrize(
    ("options", "drawn"), [("", "histogram"), ("--data digits", "dominance"), ("--kind plane", "plane")]
)
def test_the_picture_is_the_one_asked_for(options, drawn, checkpoint: Path, tmp_path: Path, monkeypatch) -> None:
    kinds, draw = [], Spectrum.plot
    monkeypatch.setattr(Spectrum, "plot", lambda self, kind: kinds.append(kind) or draw(self, kind))
    run(checkpoint, *options.split(), "--picture", tmp_path / "p.png")
    assert kinds == [drawn]
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--kind dominance --picture p.png", "needs data"),
        ("--kind pie --picture p.png", "unknown picture 'pie'"),
        ("--picture p.xyz", r"--picture p.xyz: .*one of .png"),
        ("--kind plane", "--kind says what --picture draws"),
        ("--data digits --text words.txt", "give one of them"),
        ("--tokens 8", "are about data"),
    ],
)
def test_what_cannot_be_is_refused(options, message, checkpoint: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AcutanceError, match=message):
        run(checkpoint, *options.split())
    assert not list(tmp_path.iterdir())
