"""`acutance evaluate` and `acutance compare`."""

import json
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from acutance.cli.options import JSON, Changes, DataDir, Device, Markdown, Split, Weights, option, say, write
from acutance.errors import AcutanceError


def evaluate(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    split: Split = "test",
    data_dir: DataDir = None,
    weights: Weights = "last",
    multi_scale: Annotated[bool | None, option("Of segmentation, with flips.", "--multi-scale/--single-scale")] = None,
    assignments: Changes = None,
    device: Device = "auto",
    json_path: JSON = None,
) -> None:
    """Score a finished run on the test set; the result is kept in its folder, for `acutance compare`.

    Examples: acutance evaluate runs/cifar100-seed0 --data-dir /data

    acutance evaluate runs/camvid-seed0 --single-scale --set task.test_stride=64

    Several processes share the work: torchrun --nproc-per-node 2 -m acutance evaluate …
    """
    from acutance.distributed import joined
    from acutance.lab.evaluate.evaluate import evaluate_run
    from acutance.lab.train.run import Run

    settings = list(assignments or [])
    if multi_scale is not None:
        if (kind := Run(run).config().task.kind) != "segmentation":
            asked = "--multi-scale" if multi_scale else "--single-scale"
            raise AcutanceError(f"{asked} is for runs of segmentation; {run} is one of {kind}: leave it out")
        settings.insert(0, f"task.multi_scale={str(multi_scale).lower()}")
    chosen = cast(Any, weights)  # evaluate_run refuses unknown ones
    with joined() as (rank, _):
        found = evaluate_run(run, split=split, weights=chosen, data_dir=data_dir, settings=settings, device=device)
    if rank > 0:
        return
    for name, value in found.scores.items():
        say(f"{name} {value:.6g}")
    say(f"wrote {found.path(run)}")
    write(json_path, found.path(run).read_bytes())


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs; those of one group by seed.")],
    split: Split = "test",
    score: Annotated[str | None, option("Which score; by default the task's own.")] = None,
    weights: Annotated[str | None, option("Scores of the last or the best weights.")] = None,
    assignments: Annotated[list[str] | None, option("Scores of evaluations with this field changed.", "--set")] = None,
    robustness: Annotated[bool, option("What `acutance robustness` measured.", "--robustness")] = False,
    markdown_path: Markdown = None,
    json_path: JSON = None,
) -> None:
    """Compare runs: those that differ in their seed only are one row, with mean ± standard deviation.

    Each row is also compared with the first over the seeds that both have, by an exact paired test: the share of all
    choices of signs of the differences whose mean is as far from 0. All scores must have come about in the same way,
    which is printed: the same weights, the same settings of the evaluation, the same precision.

    Examples: acutance compare runs/plain-seed* runs/neutreno-seed*

    acutance compare runs/plain-seed* runs/neutreno-seed* --robustness
    """
    from acutance.lab.evaluate.compare import compare as compared
    from acutance.lab.evaluate.compare import compare_robustness

    if robustness and assignments:
        raise AcutanceError("--robustness takes no --set: it finds the tables that were measured in the same way")
    options: dict[str, Any] = {"split": split, "score": score}
    if robustness:
        tables = compare_robustness(runs, weights=cast(Any, weights or "last"), **options)
        table, body = "\n".join(one.to_markdown() for one in tables), [one.to_dict() for one in tables]
    else:
        found = compared(runs, weights=cast(Any, weights), settings=assignments, **options)
        table, body = found.to_markdown(), cast(Any, found.to_dict())
    say(table, end="")
    write(markdown_path, table.encode())
    write(json_path, json.dumps(body, indent=1, ensure_ascii=False).encode())
