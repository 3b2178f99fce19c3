"""Several processes on one folder: each run is trained by one of them, and data is looked for before the first."""

import json
import shutil
import subprocess
import sys
from contextlib import nullcontext

import pytest

from acutance.errors import AcutanceError
from acutance.lab.reproduce import find, standins
from acutance.lab.reproduce import plan as plan_room
from acutance.lab.reproduce.session import Session
from forked import run_beside

HOLD = """
import fcntl, sys
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def session(out, name="neutreno-table8", **options):
    return Session(find(name), out, **{"scale": "tiny", **options})


@pytest.fixture
def holding(tmp_path):
    """Starts a process that holds the first run of a target, as one that trains it does."""
    started = []

    def start(name, by_command=False):
        planned = session(tmp_path, name).plan[0]
        path = planned.run.folder / ".lock" if by_command else planned.lock_path
        path.parent.mkdir(parents=True)
        words = [sys.executable, "-c", HOLD, str(path)]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def sessions(planned):
    return len(json.loads((planned.run.folder / "run.json").read_text())["sessions"])


@pytest.mark.parametrize("by_command", [False, True], ids=["reproduce", "train"])
def test_what_another_process_trains_is_left_to_it_until_it_is_killed(tmp_path, holding, capsys, by_command):
    other = holding("neutreno-table8", by_command)
    result = session(tmp_path).run()
    assert result.pending == ("cifar10-kernel-seed0",)
    assert "cifar10-kernel-seed0 is being trained by" in capsys.readouterr().out
    assert [planned.state for planned in session(tmp_path).plan] == ["new", "finished"]
    other.kill()
    other.wait()
    assert not session(tmp_path).run().pending
    assert [sessions(planned) for planned in session(tmp_path).plan] == [1, 1]


def test_nobody_starts_from_a_run_that_is_not_finished(tmp_path, holding):
    """The first of Table 6 is what the second starts from; the other family goes on."""
    holding("neutreno-table6")
    result = session(tmp_path, "neutreno-table6").run()
    assert result.pending == ("deit-tiny-symmetric-seed0", "ade20k-symmetric-seed0")


def test_what_was_held_up_is_trained_in_a_second_round(tmp_path, monkeypatch):
    """Another process finishes the base while this one trains something else."""
    order, real, taken = [], plan_room.train, plan_room.Planned.taken

    def train(config, folder, **options):
        order.append(folder.name)
        return real(config, folder, **options)

    def take(planned):
        busy = planned.label == "deit-tiny-symmetric-seed0" and not order
        return nullcontext("somebody") if busy else taken(planned)

    monkeypatch.setattr(plan_room, "train", train)
    monkeypatch.setattr(plan_room.Planned, "taken", take)
    assert not session(tmp_path, "neutreno-table6").run().pending
    kinds = ("deit-tiny-symmetric-neutreno", "ade20k-symmetric-neutreno", "deit-tiny-symmetric", "ade20k-symmetric")
    assert order == [f"{kind}-seed0" for kind in kinds]


@pytest.mark.slow
def test_two_commands_at_once_train_each_run_once(tmp_path):
    words = ("reproduce", "neutreno-table8", "--scale", "tiny", "--seeds", "2", "--out", tmp_path)
    both = run_beside(2 * [(words, {})], seconds=300)
    assert [done.returncode for done in both] == [0, 0], both
    plan = session(tmp_path, seeds=2).plan
    assert [planned.state for planned in plan] == ["finished"] * 4
    assert [sessions(planned) for planned in plan] == [1] * 4
    result = json.loads((tmp_path / "tiny" / "neutreno-table8" / "result.json").read_text())
    assert result["pending"] == []
    assert all(len(row["measured"]["accuracy"]["by_seed"]) == 2 for row in result["sheets"][0]["rows"])


def test_a_part_is_not_written_over_the_whole(tmp_path):
    part = session(tmp_path).run((1, 2))
    whole = session(tmp_path).run()
    made = session(tmp_path)
    assert len(made.write(whole)) == 2
    assert made.write(part) == []
    assert json.loads((made.folder / "result.json").read_text())["pending"] == []


def test_stand_ins_are_made_by_whoever_is_first(tmp_path, monkeypatch):
    real = standins._write_imagenet

    def write(folder):
        """Another process finishes in the meantime."""
        real(folder)
        real(tmp_path / "imagenet")

    monkeypatch.setattr(standins, "_write_imagenet", write)
    assert len(list(standins.imagenet(tmp_path).rglob("*.png"))) == standins.CLASSES * (standins.PER_CLASS + 5)
    assert [path.name for path in tmp_path.iterdir()] == ["imagenet"]


def full(out, name, data_dir, *changes):
    return Session(find(name), out, data_dir=data_dir, device="cpu", seeds=1, changes=changes)


def test_data_is_looked_for_before_the_first_training(tmp_path):
    """Table 2 needs ImageNet first and ADE20K weeks later."""
    data = standins.imagenet(tmp_path / "data").parent
    for number in range(100):  # one in a hundred of a class is held out
        shutil.copy(data / "imagenet/train/digit0/000.png", data / f"imagenet/train/digit0/more-{number}.png")
    changes = (f"task.model.num_classes={standins.CLASSES}",)
    with pytest.raises(AcutanceError) as caught:
        full(tmp_path / "out", "neutreno-table2", data, *changes).run()
    assert str(caught.value).startswith(f"ADE20K: looked for {data / 'ADEChallengeData2016'}, which is not there")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    shutil.rmtree(data / "imagenet" / "val" / "digit1")
    with pytest.raises(AcutanceError) as caught:
        full(tmp_path / "out", "neutreno-table2", data, *changes).run()
    first, second = str(caught.value).splitlines()
    assert "digit1 is missing" in first
    assert second.startswith("ADE20K: ")


def test_each_missing_set_is_one_line(tmp_path):
    with pytest.raises(AcutanceError) as caught:
        full(tmp_path / "out", "oversmoothing-fig5", tmp_path).run()
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == ["CIFAR-100", "WikiText-103"]
    standins.wikitext(tmp_path)
    (tmp_path / "wikitext-103" / "wiki.test.tokens").unlink()
    with pytest.raises(AcutanceError, match=r"WikiText-103: looked for .*wiki\.test\.tokens"):
        full(tmp_path / "out", "neutreno-table3", tmp_path).run()
    assert not (tmp_path / "out").exists()


def test_what_is_finished_needs_no_data(tmp_path, monkeypatch):
    session(tmp_path).run()
    asked = []
    monkeypatch.setattr("acutance.lab.reproduce.session.check_data", lambda configs: asked.extend(configs))
    session(tmp_path).run()
    assert asked == []
