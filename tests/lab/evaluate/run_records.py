"""Runs made of records alone: nothing is trained."""

from acutance.lab import recipes
from acutance.lab.evaluate import Evaluation
from acutance.lab.train import Run, override
from acutance.lab.train.initial_weights import initial_weights


def record(
    folder,
    *changes,
    scores=None,
    settings=(),
    split="test",
    recipe="digits",
    weights="last",
    trained=None,
    start=None,
):
    run = Run(folder)
    if not run.exists():
        config = override(recipes.load(recipe), [*changes, *([] if start is None else [f"task.weights={start}"])])
        run.begin(config, recipe, 1, None if start is None else initial_weights(config.task).to_dict())
        run.write_result({"step": 1, "scores": trained or {}, "headline": "top1", "best": None})
    if scores is not None:
        Evaluation(
            split=split,
            weights=weights,
            settings=settings,
            scores=scores,
            headline="top1",
            higher_is_better=True,
            model="",
            precision="float32",
            command=(),
            evaluated="",
            versions={},
            hardware={},
            git=None,
        ).save(folder)
    return folder
