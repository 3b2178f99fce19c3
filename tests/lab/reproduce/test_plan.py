"""Plans: what is trained once, by whom, from which data, and what happens when something goes wrong."""

import json
import shlex
import shutil
from contextlib import nullcontext
from unittest.mock import Mock

import pytest

import standins
from acutance.errors import AcutanceError
from acutance.lab import locks, recipes
from acutance.lab.reproduce import TARGETS
from acutance.lab.reproduce import run as run_room
from acutance.lab.train import Run, override

FAMILIES = ("deit-tiny-symmetric", "ade20k-symmetric", "deit-tiny-symmetric-neutreno", "ade20k-symmetric-neutreno")


def trained(planned):
    return len(json.loads((planned.run.folder / "run.json").read_text())["sessions"])


def test_a_run_stands_after_the_one_it_starts_from_and_waits_for_it(session, monkeypatch):
    plan = session("neutreno-table6", seeds=2).plan
    assert [planned.label for planned in plan] == [f"{name}-seed{seed}" for seed in (0, 1) for name in FAMILIES]
    with locks.held(plan[0].lock_path):  # what the second starts from; the other family goes on
        assert session("neutreno-table6").run().pending == ("deit-tiny-symmetric-seed0", "ade20k-symmetric-seed0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(AcutanceError, match="start it once for each GPU"):
        session()


def test_what_is_there_is_reused_and_a_part_is_not_written_over_the_whole(session, monkeypatch):
    first = session()
    with monkeypatch.context() as patch:
        patch.setattr(run_room.Session, "_train", lambda _: False)
        first.plan[0].train("cpu", first.console)
        part = first.run()
    assert part.pending == ("cifar10-kernel-neutreno-seed0",)
    assert "Not finished yet" in part.to_markdown()
    assert part.sheets[0].lines[1].note == "seed 0 new"
    whole = session().run()
    assert not whole.pending
    assert len(first.write(whole)) == 2
    assert first.write(part) == []
    for name in ("train", "evaluate_run"):
        monkeypatch.setattr(run_room, name, Mock(side_effect=AssertionError("again")))
    monkeypatch.setattr(run_room, "check_data", lambda configs: pytest.fail("asked again") if [*configs] else None)
    assert session().run().sheets == whole.sheets


@pytest.mark.usefixtures("full_scale")
def test_a_field_that_some_tasks_lack_is_changed_in_the_others_and_one_that_all_lack_is_refused(session):
    """ImageNet in shards, and ADE20K beside it."""
    changes = ("task.shards=/data/train-{000..146}.tar", "loop.log_every=7")
    plan = session("neutreno-table2", data_dir="/data", changes=changes).plan
    shards = {planned.recipe: getattr(planned.config.task, "shards", None) for planned in plan}
    assert shards == {"deit_tiny": "/data/train-{000..146}.tar", "ade20k": None}
    assert {planned.config.loop.log_every for planned in plan} == {7}
    for name, change in (("neutreno-table2", "task.shrads=x"), ("neutreno-table8", "task.shards=x")):
        with pytest.raises(AcutanceError, match=r"task has no field 'sh"):
            session(name, changes=(change,))


def test_how_the_work_is_done_may_change_but_neither_settings_nor_the_seed(session):
    planned, other = session(seeds=2).plan[::3]
    Run(planned.run.folder).begin(override(planned.config, ["loop.graph=true", "task.compile_augment=true"]), None, 1)
    planned.check()
    Run(other.run.folder).begin(override(other.config, ["loop.seed=5"]), None, 1)
    with pytest.raises(AcutanceError, match=r"loop\.seed 5 instead of 1"):
        other.check()
    with pytest.raises(AcutanceError, match=r"optim.lr 0.002 instead of 0.003: name another folder"):
        session(changes=("optim.lr=0.003",)).run()


def test_the_plan_is_a_script_that_trains_the_very_runs(session, tmp_path, monkeypatch, command):
    """The printed commands, run by themselves, begin or end runs that reproduce takes as its own."""

    reproduce = ["reproduce", "neutreno-table8", "--seeds", "1", "--out", tmp_path]

    def plan():
        """What it says of each run, and the commands that are left."""
        printed = command(*reproduce, "--plan").splitlines()
        states = [line.rpartition(": ")[2] for line in printed if line.startswith("# cifar10-kernel")]
        return states, [shlex.split(line) for line in printed if not line.startswith("#")]

    begun = session().plan[0]
    with monkeypatch.context() as patch:
        patch.setattr("acutance.lab.train.loop.Loop._step", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            begun.train("cpu", session().console)
    states, (first, second) = plan()
    assert states == ["begun", "new"]
    assert ("--resume" in first, "--resume" in second) == (True, False)
    for words, left in ((first, (["finished", "new"], [second])), (second, (["finished"] * 2, []))):
        command(*words[1:], "--device", "cpu")
        assert plan() == left
        session().plan[0].check()
    assert trained(begun) == 2
    assert "| Kernel Transformer | 75.89 |" in command(*reproduce, "--device", "cpu")
    assert (tmp_path / "neutreno-table8" / "result.md").is_file()


@pytest.mark.usefixtures("full_scale")
def test_every_command_of_every_plan_says_the_whole_configuration(session):
    for target in TARGETS.values():
        for planned in session(target, data_dir="/data").plan:
            _, _, recipe, _, _, *rest = shlex.split(planned.command())
            assert rest[::2] == ["--set"] * (len(rest) // 2)
            assert override(recipes.load(recipe), rest[1::2]) == planned.config, planned.label


@pytest.mark.parametrize("by_command", [False, True], ids=["reproduce", "train"])
def test_what_another_process_trains_is_left_to_it_until_it_ends(session, capsys, by_command):
    first = session().plan[0]
    with locks.held(first.run.lock_path if by_command else first.lock_path):
        assert session().run().pending == ("cifar10-kernel-seed0",)
    assert "cifar10-kernel-seed0 is being trained by" in capsys.readouterr().out
    assert [planned.state for planned in session().plan] == ["new", "finished"]
    assert not session().run().pending
    assert [trained(planned) for planned in session().plan] == [1, 1]


def test_what_was_held_up_is_trained_in_a_second_round(session, monkeypatch):
    """Another process finishes the base while this one trains something else."""
    train, taken = Mock(wraps=run_room.train), run_room.Planned.taken

    def take(planned):
        busy = planned.label == "deit-tiny-symmetric-seed0" and not train.called
        return nullcontext("somebody") if busy else taken(planned)

    monkeypatch.setattr(run_room, "train", train)
    monkeypatch.setattr(run_room.Planned, "taken", take)
    assert not session("neutreno-table6").run().pending
    order = [call.args[1].name for call in train.call_args_list]
    assert order == [f"{kind}-seed0" for kind in FAMILIES[2:] + FAMILIES[:2]]


@pytest.mark.usefixtures("full_scale")
def test_data_is_looked_for_before_the_first_training_and_each_missing_set_is_one_line(session, tmp_path):
    """Table 2 needs ImageNet first and ADE20K weeks later."""
    data, out = standins.imagenet(tmp_path / "data").parent, tmp_path / "out"
    for number in range(100):  # one in a hundred of a class is held out
        shutil.copy(data / "imagenet/train/digit0/000.png", data / f"imagenet/train/digit0/more-{number}.png")
    table2 = session("neutreno-table2", out, data_dir=data, changes=(f"task.model.num_classes={standins.CLASSES}",))

    def missing(of):
        with pytest.raises(AcutanceError) as caught:
            of.run()
        return str(caught.value).splitlines()

    (only,) = missing(table2)
    assert only.startswith(f"ADE20K: looked for {data / 'ADEChallengeData2016'}, which is not there")
    assert not out.exists()
    shutil.rmtree(data / "imagenet" / "val" / "digit1")
    first, second = missing(table2)
    assert "digit1 is missing" in first
    assert second.startswith("ADE20K: ")
    assert "cifar10 is read from a folder: name it with --data-dir" in missing(session(out=out))[0]
    both = missing(session("oversmoothing-fig5", data_dir=tmp_path))
    assert [line.partition(":")[0] for line in both] == ["CIFAR-100", "WikiText-103"]
