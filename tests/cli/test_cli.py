"""Whole commands, as a user types them."""

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

import acutance as ac
from acutance import cli
from acutance.cli.options import ints, words
from acutance.explain import Spectrum
from acutance.measure.profile import Profile
from forked import run_forked

ACUTANCE = str(Path(sys.executable).with_name("acutance"))
SIZES = {"image_size": 8, "patch_size": 2, "in_chans": 1, "dim": 12, "depth": 3, "heads": 2, "num_classes": 10}
VERBS = ["measure", "explain", "mitigate", "demo", "train", "evaluate", "compare", "robustness", "reproduce", "bench"]
SHORT = ("--limit", "9", "--metrics", "token_cosine")
acutance = partial(run_forked, COLUMNS="200", NO_COLOR="1")


@pytest.fixture
def here(monkeypatch, capsys):
    """The same in this process, which saves the start: (exit status, standard output, standard error)."""

    def call(*arguments: object) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["acutance", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as stopped:
            cli.run()
        return stopped.value.code, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    return ac.save(ac.models.ViT(**SIZES), tmp_path_factory.mktemp("plain") / "model.safetensors")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    model = ac.models.ViT(**{**SIZES, "depth": 2}, mitigation="neutreno:0.6")
    return ac.save(model, tmp_path_factory.mktemp("run") / "model.safetensors")


def test_help_names_every_command() -> None:
    command = [ACUTANCE, "--help"]  # the installed one
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert all(word in text for word in (*VERBS, "lab", "over-smoothing"))
    assert re.search(r"acutance \d+\.\d+", acutance("--version").stdout)


@pytest.mark.parametrize("command", VERBS)
def test_help_teaches(command: str, here) -> None:
    status, printed, _ = here(command, "--help")
    assert status == 0
    assert len(printed.splitlines()) > 8


def test_help_flows_in_a_narrow_terminal() -> None:
    """Lines of a docstring are not lines of the terminal: broken twice, every other line is a stump."""
    done = run_forked("compare", "--help", COLUMNS="80", NO_COLOR="1")
    paragraph = re.search(r"Each row(.|\n)*?precision\.", done.stdout)[0]
    *full, _ = [line.strip() for line in paragraph.splitlines()]
    assert all(len(line) > 60 for line in full), paragraph


def test_measure_prints_and_writes(checkpoint: Path, tmp_path: Path) -> None:
    done = acutance(
        "measure", checkpoint.parent, "--tap", "block,final", "--metrics", "token_cosine,head_cosine",
        "--prefix", "out", "--json", tmp_path / "p.json", "--html", tmp_path / "p.html",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "ViT + neutreno:0.6" in done.stdout
    profile = Profile.load(tmp_path / "p.json")
    assert profile.taps == ["block", "final", "attention_matrix"]
    context = [profile.context[name] for name in ("samples", "data", "name")]
    assert context == [364, "364 test images of the embedded digits", str(checkpoint.parent)]
    assert (tmp_path / "p.html").stat().st_size > 500_000


def test_explain_prints_a_verdict_per_layer(checkpoint: Path, tmp_path: Path) -> None:
    done = acutance("explain", checkpoint, "--picture", tmp_path / "h.png")
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"│ (smoothing|sharpening|neutral)", done.stdout)) == 2
    assert "neutreno:0.6 acts beside" in " ".join(done.stdout.split())
    assert (tmp_path / "h.png").read_bytes().startswith(b"\x89PNG")


def test_explain_reads_attention_with_data(checkpoint: Path, tmp_path: Path) -> None:
    files = {kind: tmp_path / f"s.{kind}" for kind in ("json", "html", "png")}
    written = [word for option, kind in (("--json", "json"), ("--html", "html"), ("--picture", "png"))
               for word in (option, files[kind])]  # fmt: skip
    done = acutance("explain", checkpoint, "--data", "digits", *written)
    assert done.returncode == 0, done.stderr
    assert "100/0" in done.stdout
    assert Spectrum.load(files["json"]).context["samples"] == 364
    assert files["html"].stat().st_size > 500_000
    assert files["png"].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["measure", "nowhere"], "no checkpoint at nowhere; a model of transformers is written hf:nowhere"),
        (["measure", "[train]"], "no checkpoint at [train];"),  # a terminal library would take it for markup
        (["measure", "a:tm:b"], "no checkpoint at a:tm:b"),  # or for an emoji
        (["measure", "hf:no/such/model"], "hf:no/such/model: there is no file or folder"),
        (["measure", "MODEL", "--text", "a.txt"], "does not read text"),
        (["measure", "MODEL", "--tokens", "8"], "it needs --text FILE"),
        (["measure", "MODEL", "--device", "tpu"], "cpu, cuda or auto, not 'tpu'"),
        (["measure", "MODEL", "--dtype", "int8"], "dtype 'int8'"),
        (["measure", "MODEL", "--metrics", "smoothness"], "unknown metric smoothness"),
        (["measure", "MODEL", "--tap", "head"], "unknown tap head"),
        (["measure", "MODEL", "--prefix", "maybe"], "'in' or 'out', not 'maybe'"),
        (["measure", "MODEL", "--data-dir", "data"], "--data-dir says where a run's own data lies"),
        (["measure", "LARGE"], "say what it shall read with --images DIR"),
        (["mitigate", "MODEL", "featscale", "--layers", "one"], "--layers takes numbers"),
        (["mitigate", "nowhere", "neutrino:0.6"], "unknown mitigation 'neutrino'"),  # before anything is read
        (["explain", "DAMAGED"], "cannot be read as weights"),
        (["explain", "MODEL", "--data", "imagenet"], "--data takes digits or own"),
        (["explain", "MODEL", "--data", "own"], "--data own is what a run of `acutance train` was tested on"),
    ],
)
def test_errors_are_one_clear_line(arguments, message, checkpoint: Path, tmp_path: Path, here) -> None:
    damaged, large = tmp_path / "damaged.safetensors", tmp_path / "large.safetensors"
    damaged.write_bytes(checkpoint.read_bytes()[:100])
    if "LARGE" in arguments:
        ac.save(ac.models.ViT(**{**SIZES, "image_size": 16}), large)
    places = {"MODEL": checkpoint, "DAMAGED": damaged, "LARGE": large}
    status, _, error = here(*(places.get(a, a) for a in arguments))
    assert status == 2
    assert message in error
    assert len(error.splitlines()) == 1


def test_mitigate_prints_before_and_after_and_saves(plain: Path, tmp_path: Path) -> None:
    options = ("--limit", "20", "--metrics", "token_cosine")
    done = acutance("mitigate", plain, "neutreno:0.6", "--layers", "2,3", *options, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"block +│ +(\d) │ (\S+) → (\S+)", done.stdout)
    assert [layer for layer, _, _ in rows] == ["0", "1", "2", "3"]
    assert [before == after for _, before, after in rows] == [True, True, False, False], "layers 2 and 3 have changed"
    again = acutance("measure", tmp_path, *options, "--json", tmp_path / "p.json")
    assert again.returncode == 0, again.stderr
    profile = Profile.load(tmp_path / "p.json")
    assert profile.context["mitigation"] == "neutreno:0.6 in layers 2, 3"
    assert [f"{mean:.4f}" for mean in profile["token_cosine"]] == [after for _, _, after in rows]


def test_ctrl_c_leaves_no_half_written_file(tmp_path: Path) -> None:
    """Stop a real demo just after its first run is on disk; what is there is whole, and it says how to go on."""
    demo = subprocess.Popen(
        [ACUTANCE, "demo", "--out", str(tmp_path), "--epochs", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    while not (tmp_path / "plain-seed0" / "result.json").exists():
        assert demo.poll() is None, "ended before it could be stopped"
        time.sleep(0.05)
    demo.send_signal(signal.SIGINT)
    output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert "goes on from there" in " ".join(output.split())
    assert (tmp_path / "plain-seed0" / "model.safetensors").is_file()
    assert not list(tmp_path.rglob(".*.safetensors")) + list(tmp_path.rglob(".writing*"))
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("command", "place"),
    [
        (("measure", "MODEL", *SHORT, "--json"), "/proc/none.json"),
        (("measure", "MODEL", *SHORT, "--html"), "FOLDER"),
        (("explain", "MODEL", "--json"), "FOLDER"),
        (("mitigate", "PLAIN", "attnscale", *SHORT, "--out"), "/proc/none"),
        (("train", "digits", "--out"), "/proc/none"),
        (("train", "digits", "--out"), "MODEL"),
    ],
)
def test_what_cannot_be_written_is_said_in_one_line(command, place, checkpoint, plain, tmp_path: Path, here) -> None:
    places = {"MODEL": checkpoint, "FOLDER": tmp_path, "PLAIN": plain}
    typed = [str(places.get(word, word)) for word in (*command, place)]
    status, _, complaint = here(*typed)
    assert status == 2
    said = [line for line in complaint.splitlines() if line.startswith("error:")]
    assert said == complaint.splitlines()[-1:]
    assert typed[-1] in said[0]


def test_errors_that_name_no_file_are_not_hidden(monkeypatch) -> None:
    def fail() -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(BrokenPipeError):
        cli.run()


def test_blanks_after_commas_are_no_part_of_a_name(checkpoint: Path, tmp_path: Path, here) -> None:
    options = ("--metrics", "token_cosine, norm_spread", "--tap", "block, attention", "--json", tmp_path / "p.json")
    status, _, complaint = here("measure", checkpoint, "--limit", "9", *options)
    assert status == 0, complaint
    profile = Profile.load(tmp_path / "p.json")
    assert (profile.metrics, profile.taps) == (["token_cosine", "norm_spread"], ["block", "attention"])
    assert (ints("1, 2", "--layers"), words("fog, contrast")) == ([1, 2], ["fog", "contrast"])


def test_of_several_stacks_the_option_is_named(tmp_path: Path, here) -> None:
    from transformers import T5Config, T5Model

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 60}
    T5Model(T5Config(**sizes, decoder_start_token_id=0)).save_pretrained(tmp_path)
    status, _, complaint = here("explain", f"hf:{tmp_path}")
    assert status == 2
    assert "name one with part='encoder' (on the command line --part encoder)" in complaint.splitlines()[-1]
    status, printed, complaint = here("explain", f"hf:{tmp_path}", "--part", "encoder")
    assert status == 0, complaint
    assert "2 layers" in printed
