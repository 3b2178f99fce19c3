import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import acutance as ac
from acutance import __main__ as command_line
from acutance.explain import Spectrum
from acutance.lab.sweep.table import Sweep
from acutance.measure.comparison import Comparison
from acutance.measure.profile import Profile
from acutance.report.tables import short
from forked import run_forked
from tiny_folders import tiny

ACUTANCE = str(Path(sys.executable).with_name("acutance"))
VERBS = [
    "diagnose",
    "measure",
    "explain",
    "mitigate",
    "sweep",
    "demo",
    "train",
    "evaluate",
    "compare",
    "robustness",
    "reproduce",
    "bench",
]
SHORT = ("--limit", "9", "--metrics", "token_cosine")


@pytest.fixture
def here(monkeypatch, capsys):
    """A command in this process, which saves the start: (exit status, standard output, standard error)."""

    def call(*arguments: object, columns: str = "200") -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["acutance", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", columns)
        with pytest.raises(SystemExit) as stopped:
            command_line.run()
        return stopped.value.code, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("plain"), depth=3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("run"), depth=2, mitigation="neutreno:0.6")


def saved(folder: Path, **options) -> Path:
    torch.manual_seed(0)
    return ac.save(ac.models.vit_digits(dim=12, heads=2, **options), folder / "model.safetensors")


def test_help_names_every_command_and_each_teaches(here) -> None:
    command = [ACUTANCE, "--help"]  # the installed one
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert all(word in text for word in (*VERBS, "lab", "over-smoothing"))
    assert re.search(r"acutance \d+\.\d+", here("--version")[1])
    for verb in VERBS:
        status, printed, _ = here(verb, "--help")
        assert (status, len(printed.splitlines()) > 8) == (0, True)
    # Lines of a docstring are not lines of the terminal: broken twice, every other line is a stump.
    paragraph = re.search(r"Each row(.|\n)*?precision\.", here("compare", "--help", columns="80")[1])[0]
    assert all(len(line.strip()) > 60 for line in paragraph.splitlines()[:-1]), paragraph


def test_measure_prints_and_writes(checkpoint: Path, tmp_path: Path, here) -> None:
    files = ("--json", tmp_path / "p.json", "--html", tmp_path / "p.html")
    options = ("--tap", "block, final", "--metrics", "token_cosine, head_cosine", "--prefix", "out")
    status, printed, complaint = here("measure", checkpoint.parent, *options, *files)
    assert status == 0, complaint
    assert "ViT + neutreno:0.6" in printed
    profile = Profile.load(tmp_path / "p.json")
    assert (profile.metrics, profile.taps) == (["token_cosine", "head_cosine"], ["block", "final", "attention_matrix"])
    context = [profile.context[name] for name in ("samples", "data", "name")]
    assert context == [364, "364 test images of the embedded digits", str(checkpoint.parent)]
    assert (tmp_path / "p.html").stat().st_size > 500_000


def test_explain_prints_verdicts_and_reads_attention_with_data(checkpoint: Path, tmp_path: Path, here) -> None:
    status, printed, complaint = here("explain", checkpoint)
    assert status == 0, complaint
    assert len(re.findall(r"│ (smoothing|sharpening|neutral)", printed)) == 2
    assert "neutreno:0.6 acts beside" in " ".join(printed.split())
    files = {option: tmp_path / f"s.{option}" for option in ("json", "html")}
    written = [word for option, path in files.items() for word in (f"--{option}", path)]
    status, printed, complaint = here("explain", checkpoint, "--data", "digits", *written)
    assert status == 0, complaint
    assert "100/0" in printed
    assert Spectrum.load(files["json"]).context["samples"] == 364
    assert files["html"].stat().st_size > 500_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["measure", "nowhere"], "no checkpoint at nowhere; a model of transformers is written hf:nowhere"),
        (["measure", "[train]"], "no checkpoint at [train];"),  # a terminal library would take it for markup
        (["measure", "a:tm:b"], "no checkpoint at a:tm:b"),  # or for an emoji
        (["measure", "MODEL", "--text", __file__], "does not read text"),
        # What can be refused before anything is loaded.
        (["measure", "nowhere", "--text", "a.txt"], "--text a.txt: there is no such file"),
        (["measure", "nowhere", "--images", __file__], "is a file: name the folder"),
        (["measure", "nowhere", "--metrics", "beauty"], "unknown metric beauty"),
        (["measure", "hf:owner/model"], "say what it shall read with --text FILE or --images DIR"),
        (["mitigate", "nowhere", "featscale", "--out", "DAMAGED"], "is a file: name a folder"),
        (["measure", "MODEL", "--device", "tpu"], "cpu, cuda or auto, not 'tpu'"),
        (["measure", "MODEL", "--dtype", "int8"], "dtype 'int8'"),
        (["measure", "MODEL", "--tap", "head"], "unknown tap head"),
        (["measure", "MODEL", "--prefix", "maybe"], "unknown prefix maybe; known: in, out"),
        (["mitigate", "MODEL", "featscale", "--layers", "one"], "--layers takes numbers"),
        (["sweep", "nowhere", "--remedies", "neutrino"], "unknown remedy 'neutrino'; did you mean neutreno"),
        (["sweep", "nowhere", "--strengths", "much"], "--strengths takes numbers"),
        (["sweep", "MODEL", "--limit", "8"], "carries 'neutreno:0.6' already"),
        (["mitigate", "PLAIN", "attnscale", "--limit", "8", "--quality", "bleu"], "quality 'bleu' cannot be measured"),
        (["mitigate", "nowhere", "neutrino:0.6"], "unknown mitigation 'neutrino'"),  # before anything is read
        (["explain", "DAMAGED"], "cannot be read as weights"),
        (["explain", "MODEL", "--data", "imagenet"], "--data takes digits or own"),
        (["explain", "MODEL", "--data", "own"], "is no run of `acutance train`"),
        (["explain", "MODEL", "--kind", "dominance", "--picture", "p.png"], "needs data"),
        (["explain", "MODEL", "--kind", "pie", "--picture", "p.png"], "unknown picture 'pie'"),
        (["explain", "MODEL", "--picture", "p.xyz"], "one of .png"),
        (["explain", "MODEL", "--kind", "plane"], "--kind says what --picture draws"),
        (["explain", "MODEL", "--data", "digits", "--text", __file__], "give one of them"),
        (["explain", "MODEL", "--tokens", "8"], "are about data"),
        # What cannot be written.
        (["measure", "MODEL", *SHORT, "--json", "/proc/none.json"], "/proc/none.json"),
        (["explain", "MODEL", "--json", "FOLDER"], "FOLDER"),
        (["mitigate", "PLAIN", "attnscale", *SHORT, "--out", "/proc/none"], "/proc/none"),
        (["train", "digits", "--out", "MODEL"], "MODEL"),
    ],
)
def test_errors_are_one_clear_line(
    arguments, message, checkpoint: Path, plain: Path, tmp_path: Path, here, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    places = {"MODEL": checkpoint, "PLAIN": plain, "FOLDER": tmp_path, "DAMAGED": tmp_path / "damaged.safetensors"}
    places["DAMAGED"].write_bytes(checkpoint.read_bytes()[:100])
    status, _, error = here(*(places.get(a, a) for a in arguments))
    assert status == 2
    (said,) = error.splitlines()
    assert said.startswith("error: ")
    assert str(places.get(message, message)) in said
    assert [*tmp_path.iterdir()] == [places["DAMAGED"]]


def test_options_reach_explain(checkpoint: Path, tmp_path: Path, here) -> None:
    options = ["--data", "digits", "--prefix", "out", "--norm", "ignore", "--no-whole", "--json"]
    assert here("explain", checkpoint, *options, tmp_path / "s.json")[0] == 0
    found = Spectrum.load(tmp_path / "s.json")
    assert found.context["prefix"] == "1 prefix tokens out"
    assert found.context["norm"] == "pre-norm weight γ: left out"
    assert [layer.deciding for layer in found.layers] == [None, None]
    assert here("explain", checkpoint, "--whole", "--json", tmp_path / "w.json")[0] == 0
    assert all(layer.eigenvalues is not None for layer in Spectrum.load(tmp_path / "w.json").layers)


@pytest.mark.parametrize(
    ("options", "drawn"), [("", "histogram"), ("--data digits", "dominance"), ("--kind plane", "plane")]
)
def test_the_picture_is_the_one_asked_for(options, drawn, checkpoint: Path, tmp_path: Path, monkeypatch, here) -> None:
    kinds, draw = [], Spectrum.plot
    monkeypatch.setattr(Spectrum, "plot", lambda self, kind: kinds.append(kind) or draw(self, kind))
    assert here("explain", checkpoint, *options.split(), "--picture", tmp_path / "p.png")[0] == 0
    assert kinds == [drawn]
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_mitigate_prints_before_and_after_and_saves(plain: Path, tmp_path: Path, here) -> None:
    asked = ("mitigate", plain, "neutreno:0.6", "--layers", "2, 3", *SHORT, "--out", tmp_path)
    status, printed, complaint = here(*asked)
    assert status == 0, complaint
    is_quality = r"(worse: fine-tune, or start with learn=head|no clear change|better)\n  accuracy \S+ → \S+ %, "
    assert re.match(is_quality, printed)
    assert "\nmodel.safetensors + neutreno:0.6 in layers 2, 3" in printed, "without the folder that both share"
    rows = re.findall(r"│ +(\d) │ +([+−]\S+) ±(\S+)", printed)
    changed = [(layer, change != "+0.000") for layer, change, _ in rows]
    assert changed == [("0", False), ("1", False), ("2", True), ("3", True)]
    assert "paired over 9 samples" in printed
    assert here("measure", tmp_path, *SHORT, "--json", tmp_path / "p.json")[0] == 0
    profile = Profile.load(tmp_path / "p.json")
    assert profile.context["mitigation"] == "neutreno:0.6 in layers 2, 3"
    assert f"token_cosine {short(profile['token_cosine'][-1])} beside" in printed


def test_compare_takes_files_and_models_and_leaves_scores_to_runs(
    plain: Path, checkpoint: Path, tmp_path: Path, here
) -> None:
    assert here("measure", plain, *SHORT, "--json", tmp_path / "plain.json")[0] == 0
    written = ("--json", tmp_path / "c.json", "--html", tmp_path / "c.html")
    status, printed, complaint = here("compare", tmp_path / "plain.json", checkpoint, *SHORT, *written)
    assert status == 0, complaint
    assert printed.startswith(f"{checkpoint.parent.name}/model.safetensors + neutreno:0.6")
    assert "paired over 9 samples" in printed
    assert "accuracy" not in printed, "a file of a profile has none"
    assert [d.layer for d in Comparison.load(tmp_path / "c.json").differences] == [0, 1, 2]
    assert printed.splitlines()[0] in re.sub("<[^>]*>", "", (tmp_path / "c.html").read_text())
    status, printed, complaint = here("compare", plain, checkpoint, *SHORT)
    judged = r"neutreno:0.6: accuracy \S+ → \S+ %, \S+ .{,60}: (better|worse|no clear change) "
    assert re.search(judged, " ".join(printed.split())), printed
    for arguments, message in [
        ((plain,), "takes two or more"),
        ((plain, checkpoint, "--split", "val"), "options on scores are for folders of runs alone"),
        ((tmp_path, "--html", "x.html"), "--html draws what is measured"),
        ((tmp_path,), "is no run"),
        ((tmp_path / "c.json", plain), "give a file of a profile or of a diagnosis"),
        (("hf:owner/model", tmp_path / "plain.json"), "say what it shall read with --text FILE"),
    ]:
        status, _, complaint = here("compare", *arguments)
        assert (status, message in complaint) == (2, True), complaint


def test_ctrl_c_leaves_no_half_written_file(tmp_path: Path) -> None:
    """Stop a real demo in its first run; what is there is whole, and it says how to go on."""
    command, told = [ACUTANCE, "demo", "--out", str(tmp_path), "--epochs", "1"], {**os.environ, "COLUMNS": "200"}
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=told)
    while not (tmp_path / "plain-seed0" / "run.json").exists():
        assert demo.poll() is None, "ended before it could be stopped"
        time.sleep(0.05)
    demo.send_signal(signal.SIGINT)
    output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 130, output
    assert "the same command resumes" in " ".join(output.split())
    assert not list(tmp_path.rglob(".*.safetensors")) + list(tmp_path.rglob(".writing*"))
    assert not (tmp_path / "report.html").exists()


def test_errors_that_name_no_file_are_not_hidden(monkeypatch) -> None:
    monkeypatch.setattr(command_line, "app", Mock(side_effect=BrokenPipeError(32, "Broken pipe")))
    with pytest.raises(BrokenPipeError):
        command_line.run()


def test_of_several_stacks_the_option_is_named(tmp_path: Path, here) -> None:
    tiny("t5", vocab_size=60).save_pretrained(tmp_path)
    complaint = here("explain", f"hf:{tmp_path}")[2]
    assert "name one with part='encoder' (on the command line --part encoder)" in complaint.splitlines()[-1]
    assert "2 layers" in here("explain", f"hf:{tmp_path}", "--part", "encoder")[1]


@pytest.mark.slow
def test_two_processes_of_torchrun_give_the_numbers_of_one(plain: Path, tmp_path: Path) -> None:
    asked = ["measure", str(plain), "--metrics", "all", "--batch", "32", "--limit", "150", "--dtype", "float64"]
    asked += ["--tap", "block,attention", "--json"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "acutance"]
    told = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "250"}
    printed = subprocess.check_output([*torchrun, *asked, tmp_path / "two.json"], text=True, env=told)
    assert printed.count("means over samples") == 1, "only the first process prints"
    assert run_forked(*asked, tmp_path / "one.json").returncode == 0
    one, two = (Profile.load(tmp_path / name) for name in ("one.json", "two.json"))
    # Forked processes have imported more, of which they tell the versions.
    assert two.context.pop("versions").items() <= one.context.pop("versions").items()
    assert two.context == one.context
    assert two.context["samples"] == 150
    for ours, theirs in zip(two.readings, one.readings, strict=True):
        assert (ours.tap, ours.layer, ours.metric, ours.count) == (theirs.tap, theirs.layer, theirs.metric, 150)
        assert (ours.mean, ours.std) == pytest.approx((theirs.mean, theirs.std), rel=1e-12, abs=1e-14)


def test_sweep_prints_a_verdict_writes_and_resumes(plain: Path, tmp_path: Path, here) -> None:
    asked = ("sweep", plain, "--limit", "8", "--batch", "4", "--remedies", "neutreno:0.6,learn=head,attnscale")
    status, printed, complaint = here(*asked, "--fine-tune", "2", "--json", tmp_path / "s.json")
    assert status == 0, complaint
    assert "8 test images of the embedded digits; 1 batches train and 1 others evaluate" in " ".join(printed.split())
    assert "None is worth it here: of 2, none improved accuracy" in printed
    found = Sweep.load(tmp_path / "s.json")
    assert [trial.spec for trial in found.trials] == ["none", "neutreno:0.6,learn=head", "attnscale"]
    assert here(*asked, "--fine-tune", "2", "--json", tmp_path / "s.json")[:2] == (0, printed)  # the same times, too
    status, _, complaint = here(*asked, "--json", tmp_path / "s.json")
    assert (status, "is another sweep" in complaint) == (2, True)


def test_mitigate_fine_tunes_on_other_data_than_it_evaluates_on(plain: Path, here) -> None:
    asked = ("mitigate", plain, "neutreno:0.6,learn=head", *SHORT[2:], "--limit", "8", "--batch", "4")
    status, printed, complaint = here(*asked, "--fine-tune", "3", "--quality", "cross-entropy")
    assert status == 0, complaint
    said = "fine-tuned for 3 steps on 4 of 8 test images of the embedded digits; evaluated on 4 of 8 test images"
    assert printed.startswith(said)
    assert re.search(r"\n(worse|better|no clear change).*\n  cross-entropy \S+ → \S+, .*\n  accuracy ", printed)
