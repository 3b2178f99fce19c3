"""A run is read on what it is tested on, in the form it was trained on."""

from pathlib import Path

import pytest
import torch

from acutance.errors import AcutanceError
from acutance.io import batches_for, load_model
from acutance.io.saving import save
from acutance.lab import recipes
from acutance.lab.data import load_images
from acutance.lab.data.augment import normalise
from acutance.lab.tasks import task_class
from acutance.lab.train import Run, override

SMALL = ("task.model.dim=12", "task.model.depth=1", "task.model.heads=2")


def begun(folder: Path, recipe: str, *changes: str) -> str:
    """A run that was begun, with a model of its first step."""
    config = override(recipes.load(recipe), [*SMALL, *changes])
    made = task_class(config.task.kind)(config.task, seed=0, device=torch.device("cpu"))
    Run(folder).begin(config, recipe, 1)
    save(made.build_model(), Run(folder).model_path)
    return str(folder)


@pytest.mark.parametrize("name", ["", "model.safetensors", "best.safetensors"])
def test_a_run_that_is_not_finished_says_how_to_go_on(tmp_path: Path, name: str) -> None:
    run = Path(begun(tmp_path / "run", "digits"))
    Run(run).model_path.unlink()
    file = run / (name or "model.safetensors")
    with pytest.raises(AcutanceError) as caught:
        load_model(str(run / name))
    assert str(caught.value) == f"there is no {file}: the run is not finished. {Run(run).how_to_go_on()}"


def write_corpus(folder: Path) -> Path:
    (folder / "wikitext-2").mkdir(parents=True)
    for part in ("train", "valid", "test"):
        (folder / "wikitext-2" / f"wiki.{part}.tokens").write_text(" the cat sat on the mat \n" * 60)
    return folder


def test_images_are_normalised_as_in_training(tmp_path: Path) -> None:
    loaded = load_model(begun(tmp_path / "run", "digits"), dtype="float64")
    batches = batches_for(loaded, batch=30, limit=70)
    assert [len(batch) for batch in batches] == [30, 30, 10]
    assert batches.description == "70 test samples of digits, as the run has them"
    test = load_images("digits", None, "test")
    prepared = normalise(test.images.float(), torch.tensor(test.mean), torch.tensor(test.std)).double()
    assert all(any(torch.equal(image, one) for one in prepared) for image in batches[0])
    assert len(set(map(tuple, torch.cat(list(batches)).flatten(1).tolist()))) > 60, "different images"


def test_a_language_model_gets_windows_of_its_corpus(tmp_path: Path) -> None:
    data = write_corpus(tmp_path / "data")
    loaded = load_model(
        begun(tmp_path / "run", "wikitext2", f"task.data_dir={data}", "task.val_stride=16", "task.length=16")
    )
    (batch,) = batches_for(loaded, limit=5)
    assert (batch.shape, batch.dtype) == ((5, 16), torch.int64)
    loaded.model(batch)


def test_the_data_may_have_moved(tmp_path: Path) -> None:
    data = write_corpus(tmp_path / "data")
    loaded = load_model(
        begun(tmp_path / "run", "wikitext2", f"task.data_dir={data}", "task.val_stride=16", "task.length=16")
    )
    data.rename(tmp_path / "elsewhere")
    with pytest.raises(AcutanceError, match=r"looked for .*data"):
        batches_for(loaded)
    assert len(batches_for(loaded, limit=3, data_dir=tmp_path / "elsewhere").samples) == 3


def test_where_data_lie_is_asked_of_runs_alone(tmp_path: Path) -> None:
    run = load_model(begun(tmp_path / "run", "digits"))
    bare = load_model(str(tmp_path / "run" / "model.safetensors"))
    with pytest.raises(AcutanceError, match="--data-dir says where a run's own data lies"):
        batches_for(bare, data_dir=tmp_path)
    with pytest.raises(AcutanceError, match="is not to read"):
        batches_for(run, images=tmp_path, data_dir=tmp_path)
    assert "embedded digits" in batches_for(bare).description


def test_a_record_of_another_kind_makes_no_run(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", "digits")
    record = tmp_path / "run" / "run.json"
    record.write_text('{"variant": "plain", "seed": 0}')  # as the demo's
    assert "embedded digits" in batches_for(load_model(folder)).description
    record.write_text('{"variant": "pl')
    with pytest.raises(AcutanceError, match=r"run\.json is not a file of the format"):
        load_model(folder)
