"""The queue as a command, killed in the middle and gone on with; and sources that are what they say."""

import json
import os
import shutil
import signal
import subprocess
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from toy_queue import TOY, write
from typer.testing import CliRunner

import acutance
from acutance.__main__ import app
from acutance.errors import AcutanceError
from acutance.lab import locks, recipes
from acutance.lab.queue import record
from acutance.lab.queue.jobs import Queue
from acutance.lab.queue.record import keep_weights
from acutance.lab.queue.results import Results
from acutance.lab.train import Run, override, provenance
from forked import FORKS, _command

TOLD = ("split", "scores", "layers", "spectra", "images_seen", "parameters", "definition", "corrupted")


def command(folder, *more):
    words = ["reproduce", "--queue", str(folder / "queue.toml"), "--out", str(folder / "out"), "--trial", "--device"]
    return [*words, "cpu", "--workers", "2", "--budget", "10m", *more]


def kill_when(seen, folder, *more):
    """Start the queue or a job of it, and kill it with all its workers as soon as something is seen."""
    streams = [folder / "output", folder / "errors"]
    process = FORKS.Process(target=_command, args=(command(folder, *more), folder, {}, streams, os.setsid))
    process.start()
    end = time.monotonic() + 300
    while not seen():
        assert time.monotonic() < end
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)


def run_job(folder, job):
    done = CliRunner().invoke(app, command(folder, "--job", job.key))
    assert done.exit_code == 0, (done.output, done.exception)


def test_a_queue_that_is_killed_anywhere_goes_on_to_the_same_results(tmp_path):
    """As a run begins, between two checkpoints, and when it is finished but not yet read."""
    one, other = Queue.load(write(tmp_path)).jobs()[:2]
    out, results = tmp_path / "out", Results(tmp_path / "out" / "results.jsonl")
    kill_when((out / one.key / "run.json").exists, tmp_path, "--job", one.key)
    kill_when((out / one.key / "checkpoints" / "step-000000004").exists, tmp_path)
    with locks.held(out / ".results.jsonl.lock"):  # it cannot write its line before it is killed
        kill_when((out / other.key / "result.json").exists, tmp_path, "--job", other.key)
    assert other.key not in results.read()
    shutil.rmtree(out / other.key)  # a folder that is lost starts again
    for job in (one, other):
        run_job(tmp_path, job)
        run_job(tmp_path, job)  # what is there is done
    assert len(results.path.read_text().splitlines()) == 2
    found, alone = results.read()[one.key], tmp_path / "alone"
    alone.mkdir()
    write(alone)
    run_job(alone, one)
    (line,) = Results(alone / "out" / "results.jsonl").read().values()
    assert {name: line.get(name) for name in TOLD} == {name: found.get(name) for name in TOLD}
    assert line["curves"]["loss"]
    assert found["sessions"] > 1
    assert CliRunner().invoke(app, command(tmp_path, "--tables")).exit_code == 0
    page = (tmp_path / "toy.md").read_text()
    assert "| plain | 1 |" in page
    assert "2 of 4 runs" in page


def test_a_final_run_is_tested_once_with_corruptions_and_may_be_kept(tmp_path, monkeypatch):
    job = Queue.load(write(tmp_path)).jobs()[4]
    run_job(tmp_path, job)
    run = Run(tmp_path / "out" / job.key)
    (whole,) = keep_weights(job, run, tmp_path / "one")
    expected = {name: value.bfloat16() for name, value in load_file(run.model_path).items()}
    torch.testing.assert_close(dict(acutance.load(whole).state_dict()), {k: v.float() for k, v in expected.items()})
    monkeypatch.setattr(record, "LARGEST", 500)
    shards = keep_weights(job, run, tmp_path / "several")
    assert len(shards) > 1
    torch.testing.assert_close({k: v for path in shards for k, v in load_file(path).items()}, expected, rtol=0, atol=0)
    with safe_open(str(shards[-1]), framework="pt") as opened:
        command, *words = opened.metadata()["trained_by"].replace("acutance train ", "").split(" --set ")
    assert override(recipes.load(command), words).to_dict() == job.config.to_dict()
    (line,) = Results(tmp_path / "out" / "results.jsonl").read().values()
    assert line["split"] == "test"
    assert {"top1", "loss", "corrupted_15", "corrupted_19"} <= line["scores"].keys()
    by_name = [line["corrupted"][name] for name in list(line["corrupted"])[:19]]
    assert line["scores"]["corrupted_15"] == pytest.approx(sum(by_name[:15]) / 15, abs=1e-3)
    assert line["scores"]["corrupted_19"] == pytest.approx(sum(by_name) / 19, abs=1e-3)


def test_divergence_is_a_result_too(tmp_path):
    """λ̃ = 1e39 overflows in the first step."""
    job = Queue.load(write(tmp_path, TOY.replace("eigen:negative,basis=polar", "neutreno:1e39"))).jobs()[1]
    run_job(tmp_path, job)
    (line,) = Results(tmp_path / "out" / "results.jsonl").read().values()
    assert line["diverged"].startswith("the loss became nan in step 1")
    assert (line["key"], line["sessions"]) == (job.key, 1)


def test_sources_that_are_not_what_their_stamp_says_are_refused(tmp_path, monkeypatch):
    copy = tmp_path / "src" / "acutance"
    copy.mkdir(parents=True)
    (copy / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(provenance, "SOURCES", copy)
    monkeypatch.setattr(provenance, "STAMP", tmp_path / "provenance.json")
    with pytest.raises(AcutanceError, match="nothing says which commit"):
        provenance.clean_commit()
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-C", str(tmp_path)]
    for words in (["init", "-q"], ["add", "src"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(provenance, "sources_digest", lambda real=provenance.sources_digest: real(copy))
    commit = provenance.clean_commit()
    stamp = json.loads(provenance.write_stamp().read_text())
    assert stamp == {"format": provenance.FORMAT, "commit": commit, "sources": provenance.sources_digest()}
    (copy / "a.py").write_text("x = 2\n")
    with pytest.raises(AcutanceError, match=f"is not what its commit {commit[:12]} says"):
        provenance.write_stamp()
    shutil.rmtree(tmp_path / ".git")
    assert provenance.git_state() == {"commit": commit, "changed": True}
    (copy / "a.py").write_text("x = 1\n")
    assert provenance.clean_commit() == commit
    (copy / "b.py").write_text("")
    with pytest.raises(AcutanceError, match="commit the changes"):
        provenance.clean_commit()
