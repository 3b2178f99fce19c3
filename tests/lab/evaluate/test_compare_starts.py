"""Runs that start from weights: those of other seeds of one run are one start, those of another run are another."""

import torch
from run_records import record

import acutance as ac
from acutance.lab.evaluate import compare
from acutance.lab.train import Run

NEUTRENO = "task.model.mitigation=neutreno:0.6"


def weights(folder, *changes, file="model.safetensors", start=None):
    """A run to start from, and the file of its weights, which no other run has."""
    record(folder, *changes, start=start)
    torch.manual_seed(sum(f"{folder.name}/{file}".encode()))
    model = ac.models.ViT(**Run(folder).config().task.model.to_dict())
    return ac.save(model, folder / file)


def starting_from(folder, start, seed=0):
    return record(folder, f"loop.seed={seed}", scores={"top1": 1.0}, start=start)


def labels(*runs):
    return [group.label for group in compare(runs).groups]


def test_each_seed_may_start_from_a_seed_of_its_own(tmp_path):
    plain = [
        starting_from(tmp_path / f"from-{seed}", weights(tmp_path / str(seed), f"loop.seed={seed}"), seed)
        for seed in (0, 1)
    ]
    steered = starting_from(tmp_path / "from-steered", weights(tmp_path / "steered", NEUTRENO), seed=1)
    best = starting_from(tmp_path / "from-best", weights(tmp_path / "0", file="best.safetensors"))
    scratch = starting_from(tmp_path / "scratch", None)
    groups = compare([*plain, steered, best, scratch]).groups
    assert [list(group.scores) for group in groups] == [[0, 1], [1], [0], [0]]
    assert labels(*plain, steered) == ["weights' mitigation none", "weights' mitigation neutreno:0.6"]
    assert labels(plain[0], best) == ["weights' file model.safetensors", "weights' file best.safetensors"]
    assert labels(plain[0], scratch) == ["weights model.safetensors", "weights none"]
    assert len(set(labels(scratch, plain[0], steered))) == 3  # told apart beside one from scratch, too


def test_a_start_is_known_by_what_that_run_started_from_in_turn(tmp_path):
    runs = []
    for name, changes in {"plain": (), "steered": (NEUTRENO,)}.items():
        second = weights(tmp_path / f"{name}-second", start=weights(tmp_path / name, *changes))
        runs.append(starting_from(tmp_path / f"{name}-third", second))
    assert labels(*runs) == ["weights' weights' mitigation none", "weights' weights' mitigation neutreno:0.6"]


def test_weights_of_no_run_are_the_file_that_they_are(tmp_path):
    """Nor is a file that somebody put beside a run's own of that run."""
    files = [weights(tmp_path / name, file="other.safetensors") for name in "ab"]
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(files[0].read_bytes())
    runs = [starting_from(tmp_path / f"from-{i}", file, seed=i) for i, file in enumerate([*files, copy])]
    assert [list(group.scores) for group in compare(runs).groups] == [[0, 2], [1]]


def test_a_start_that_is_not_recorded_is_never_pooled_with_another(tmp_path):
    runs = [
        record(tmp_path / str(i), f"loop.seed={i}", f"task.weights={i}.safetensors", scores={"top1": 1.0})
        for i in range(2)
    ]
    assert labels(*runs) == ["weights 0.safetensors", "weights 1.safetensors"]
