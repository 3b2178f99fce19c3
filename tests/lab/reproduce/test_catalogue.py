"""Every table and figure is there, and what they need exists."""

import pytest
from typer.testing import CliRunner

from acutance.cli import app
from acutance.errors import AcutanceError
from acutance.lab import recipes
from acutance.lab.reproduce import TARGETS, find
from acutance.lab.reproduce.measures import MEASURES, Reading
from acutance.lab.reproduce.trainings import TRAININGS
from acutance.lab.train import override

EXPECTED = {
    *(f"neutreno-table{i}" for i in range(1, 9)),
    *(f"neutreno-fig{i}" for i in range(1, 7)),
    *(f"oversmoothing-table{i}" for i in range(1, 4)),
    *(f"oversmoothing-fig{i}" for i in range(1, 6)),
    *("neutreno-robustness", "neutreno-robustness-imagenet", "oversmoothing-attacks"),
}


def test_no_table_and_no_figure_is_missing():
    assert TARGETS.keys() >= EXPECTED


@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_a_target_says_what_it_needs_and_costs(target):
    if not target.measure:
        assert target.notes
        with pytest.raises(AcutanceError, match="nothing to run"):
            find(target.name)
        return
    assert target.measure in MEASURES
    assert target.data
    assert target.cost
    for row in target.rows:
        assert (row.training is None) != (row.model is None)
        assert row.published.keys() <= target.columns.keys()


@pytest.mark.parametrize("training", TRAININGS.values(), ids=list(TRAININGS))
def test_a_training_can_be_configured(training):
    config = override(recipes.load(training.recipe), training.changes)
    if training.starts_from is not None:
        field, base = training.starts_from
        assert base in TRAININGS
        assert hasattr(config.task, field)


def test_no_training_is_left_over():
    used = {row.training for target in TARGETS.values() for row in target.rows}
    bases = {training.starts_from[1] for training in TRAININGS.values() if training.starts_from}
    assert TRAININGS.keys() == (used | bases) - {None}


def test_published_figures():
    """Restated from the papers."""
    rows = {row.label: row.published for row in find("neutreno-table1").rows}
    assert rows["NeuTRENO DeiT + FeatScale"] == {"top-1": 73.23, "top-5": 91.73}
    assert find("oversmoothing-table2").rows[-1].published == {"top-1": (33.99, 0.4)}
    assert find("oversmoothing-table3").rows[2].published["5"] == (40.07, 0.2)
    shares = [row.published["μ = 1 dominates"] for row in find("oversmoothing-table1").rows]
    assert shares == [100.0, 70.27, 57.82, 98.92, 100.0, 0.0]


def test_a_reading_is_taken_apart():
    assert Reading.of("test/top1") == Reading("test", "top1")
    assert Reading.of("train/nonlocal_energy@map") == Reading("train", "nonlocal_energy", "map")
    assert Reading.of("val/perplexity?a=1&b.c=2") == Reading("val", "perplexity", None, ("a=1", "b.c=2"))


def test_the_list_and_a_misspelt_name():
    printed = CliRunner().invoke(app, ["reproduce", "--list"]).output
    for name in TARGETS:
        assert name in printed
    assert "took 93 s on an H200, with NeuTRENO 94 to 98 s" in " ".join(printed.split())
    assert not any("1 runs" in target.cost for target in TARGETS.values())
    error = CliRunner().invoke(app, ["reproduce", "neutreno-tabel1"]).exception
    assert "did you mean neutreno-table1?" in str(error)
