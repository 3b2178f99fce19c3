"""Plans: what is trained once, by whom, and what happens when something goes wrong."""

import json
import shlex

import pytest
from typer.testing import CliRunner

from acutance.cli import app
from acutance.errors import AcutanceError
from acutance.lab import recipes
from acutance.lab.reproduce import TARGETS, find
from acutance.lab.reproduce import plan as plan_room
from acutance.lab.reproduce import session as session_room
from acutance.lab.reproduce.plan import mine, share_of
from acutance.lab.reproduce.session import Session
from acutance.lab.train import Run, override
from acutance.lab.train.nonfinite import DivergedError


def session(out, name="neutreno-table8", **options):
    return Session(find(name), out, **{"scale": "tiny", **options})


def test_a_run_stands_after_the_one_it_starts_from(tmp_path):
    labels = [planned.label for planned in session(tmp_path, "neutreno-table6", seeds=2).plan]
    assert labels == [
        f"{name}-seed{seed}"
        for seed in (0, 1)
        for name in (
            "deit-tiny-symmetric",
            "ade20k-symmetric",
            "deit-tiny-symmetric-neutreno",
            "ade20k-symmetric-neutreno",
        )
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shares_are_a_partition_that_keeps_families(tmp_path, count):
    plan = session(tmp_path, "neutreno-table1", seeds=2).plan
    shares = [mine(plan, (i, count)) for i in range(1, count + 1)]
    assert sorted(p.label for share in shares for p in share) == sorted(p.label for p in plan)
    for share in shares:
        labels = {p.label for p in share}
        for seed in (0, 1):
            assert (f"deit-tiny-adaptation-seed{seed}" in labels) == (f"deit-tiny-seed{seed}" in labels)


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/-2"])
def test_a_share_is_written_i_of_n(text):
    with pytest.raises(AcutanceError, match="i/n"):
        share_of(text)


def test_shares_end_at_the_same_table_and_nothing_is_trained_twice(tmp_path, monkeypatch):
    first = session(tmp_path).run((1, 2))
    assert first.pending == ("cifar10-kernel-neutreno-seed0",)
    assert "Not finished yet" in first.to_markdown()
    assert first.sheets[0].lines[1].note == "seed 0 new"
    second = session(tmp_path).run((2, 2))
    assert not second.pending
    monkeypatch.setattr(plan_room, "train", lambda *_, **__: pytest.fail("trained again"))
    monkeypatch.setattr(session_room, "evaluate_run", lambda *_, **__: pytest.fail("evaluated again"))
    again = session(tmp_path).run()
    assert again.sheets == second.sheets


def test_a_run_that_was_cut_goes_on(tmp_path, monkeypatch):
    def die(*_, **__):
        raise KeyboardInterrupt

    planned = session(tmp_path).plan[0]
    with monkeypatch.context() as patch:
        patch.setattr("acutance.lab.train.loop.Loop._step", die)
        with pytest.raises(KeyboardInterrupt):
            planned.train("cpu", session(tmp_path).console)
    assert planned.state == "begun"
    assert not session(tmp_path).run().pending
    assert len(json.loads((planned.run.folder / "run.json").read_text())["sessions"]) == 2


def test_a_folder_with_other_settings_is_refused(tmp_path):
    session(tmp_path).run((1, 2))
    with pytest.raises(AcutanceError, match=r"optim.lr 0.002 instead of 0.003: name another folder"):
        session(tmp_path, changes=("optim.lr=0.003",)).run((1, 2))


def test_a_field_that_some_tasks_lack_is_changed_in_the_others_and_one_that_all_lack_is_refused(tmp_path):
    """ImageNet in shards, and ADE20K beside it."""
    changes = ("task.shards=/data/train-{000..146}.tar", "loop.log_every=7")
    plan = session(tmp_path, "neutreno-table2", scale="full", seeds=1, data_dir="/data", changes=changes).plan
    shards = {planned.recipe: getattr(planned.config.task, "shards", None) for planned in plan}
    assert shards == {"deit_tiny": "/data/train-{000..146}.tar", "ade20k": None}
    assert {planned.config.loop.log_every for planned in plan} == {7}
    for name, change in (("neutreno-table2", "task.shrads=x"), ("neutreno-table8", "task.shards=x")):
        with pytest.raises(AcutanceError, match=r"task has no field 'sh"):
            session(tmp_path, name, changes=(change,))


def test_how_the_work_is_done_may_change_but_not_the_seed(tmp_path):
    planned = session(tmp_path).plan[0]
    Run(planned.run.folder).begin(override(planned.config, ["loop.graph=true", "task.compile_augment=true"]), None, 1)
    planned.check()
    other = session(tmp_path, seeds=2).plan[-1]
    Run(other.run.folder).begin(override(other.config, ["loop.seed=5"]), None, 1)
    with pytest.raises(AcutanceError, match=r"loop\.seed 5 instead of 1"):
        other.check()


def test_divergence_is_a_result(tmp_path, monkeypatch):
    def diverge(config, folder, **_):
        Run(folder).begin(config, None, 1)
        raise DivergedError("the loss became nan in step 3")

    with monkeypatch.context() as patch:
        patch.setattr(plan_room, "train", diverge)
        result = session(tmp_path).run()
    assert not result.pending
    assert result.sheets[0].lines[0].note == "seed 0 diverged"
    assert session(tmp_path).plan[0].divergence == "the loss became nan in step 3"


def test_the_plan_is_a_script_that_trains_the_very_runs(tmp_path, monkeypatch):
    """The printed commands, run by themselves, begin or end runs that reproduce takes as its own."""
    options = ["reproduce", "neutreno-table8", "--scale", "tiny", "--out", str(tmp_path), "--plan"]

    def commands():
        printed = CliRunner().invoke(app, options).output.splitlines()
        return [shlex.split(line) for line in printed if not line.startswith("#")], printed

    def run(command):
        assert command[0] == "acutance"
        done = CliRunner().invoke(app, [*command[1:], "--device", "cpu"])
        assert done.exit_code == 0, done.output
        assert session(tmp_path).plan[0].state == "finished"
        session(tmp_path).plan[0].check()

    begun = session(tmp_path).plan[0]
    with monkeypatch.context() as patch:
        patch.setattr("acutance.lab.train.loop.Loop._step", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            begun.train("cpu", session(tmp_path).console)
    (first, second), printed = commands()
    assert printed[1] == "# cifar10-kernel-seed0: begun"
    assert printed[3] == "# cifar10-kernel-neutreno-seed0: new"
    assert "--resume" in first
    assert "--resume" not in second
    run(first)
    (left,), printed = commands()
    assert printed[1:3] == ["# cifar10-kernel-seed0: finished", "# cifar10-kernel-neutreno-seed0: new"]
    assert left == second
    run(second)
    assert commands()[0] == []


def test_a_share_is_planned_by_itself(tmp_path):
    options = ["reproduce", "neutreno-table8", "--scale", "tiny", "--out", str(tmp_path), "--plan", "--only"]

    def planned(only):
        printed = CliRunner().invoke(app, [*options, only]).output.splitlines()
        return [line for line in printed if line.endswith(": new")]

    assert planned("1/2") == ["# cifar10-kernel-seed0: new"]
    assert planned("2/2") == ["# cifar10-kernel-neutreno-seed0: new"]
    with pytest.raises(AcutanceError, match="i/n"):
        CliRunner().invoke(app, [*options, "3/2"], catch_exceptions=False)


@pytest.mark.parametrize("scale", ["full", "tiny"])
def test_every_command_of_every_plan_says_the_whole_configuration(tmp_path, scale):
    for name, target in TARGETS.items():
        if not target.measure:
            continue
        for planned in session(tmp_path, name, scale=scale, seeds=1, data_dir="/data").plan:
            _, _, recipe, _, _, *rest = shlex.split(planned.command())
            assert rest[::2] == ["--set"] * (len(rest) // 2)
            assert override(recipes.load(recipe), rest[1::2]) == planned.config, planned.label


def test_several_processes_are_told_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(AcutanceError, match="start it once for each GPU"):
        session(tmp_path)


def test_full_scale_asks_for_data(tmp_path):
    with pytest.raises(AcutanceError, match="cifar10 is read from a folder: name it with --data-dir"):
        session(tmp_path, scale="full", device="cpu").run()
    with pytest.raises(AcutanceError, match="scale is one of full, tiny"):
        session(tmp_path, scale="huge")


def test_the_command_prints_and_writes(tmp_path):
    options = ["reproduce", "oversmoothing-fig4", "--scale", "tiny", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 0, done.output
    assert "Post-LN, weights −1" in done.output
    assert (tmp_path / "tiny" / "oversmoothing-fig4" / "result.md").is_file()


def test_runs_of_other_shares_are_of_the_same_settings_or_refused(tmp_path):
    session(tmp_path, changes=("optim.lr=0.003",)).run((1, 2))
    with pytest.raises(AcutanceError, match=r"optim.lr 0.003 instead of 0.002"):
        session(tmp_path).run((2, 2))
