"""`acutance evaluate` and `acutance compare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.markup import escape

from acutance import distributed as processes
from acutance.errors import AcutanceError
from acutance.files.atomic import atomic_write

console = Console(emoji=False)


def evaluate(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    split: Annotated[str, typer.Option(help="test, or val or train of the training set.")] = "test",
    data_dir: Annotated[Path | None, typer.Option(help="Where the data is now, if not where it was.")] = None,
    weights: Annotated[str, typer.Option(help="last, which recipes report, or best on the held-out slice.")] = "last",
    multi_scale: Annotated[
        bool | None, typer.Option("--multi-scale/--single-scale", help="Of segmentation: several scales and flips too.")
    ] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", help="Change how it is read, e.g. --set task.test_stride=64.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the result here.")] = None,
    robustness: Annotated[
        bool, typer.Option("--robustness", help="Then also all corruptions and attacks, as `acutance robustness` does.")
    ] = False,
) -> None:
    """Score a finished run on the test set; the result is kept in its folder, for `acutance compare`.

    Examples: acutance evaluate runs/cifar100-seed0 --data-dir /data

    acutance evaluate runs/camvid-seed0 --single-scale

    acutance evaluate runs/cifar100-seed0 --robustness

    Several processes share the work: torchrun --nproc-per-node 2 -m acutance evaluate …
    """
    from acutance.lab.evaluate.evaluate import Weights, evaluate_run

    if robustness:
        from acutance.lab.robustness.images import refuse_others
        from acutance.lab.train.run import Run

        refuse_others(Run(run).config().task)  # before an evaluation that may take hours
    scales = [] if multi_scale is None else [_scales(run, multi_scale)]
    with processes.joined() as (rank, _):
        found = evaluate_run(
            run,
            split=split,
            weights=cast(Weights, weights),  # evaluate_run refuses anything else
            data_dir=data_dir,
            settings=[*scales, *(assignments or [])],
            device=device,
        )
    if rank > 0:
        return
    path = found.path(run)
    for name, value in found.scores.items():
        console.print(f"{name} {value:.6g}", highlight=False)
    if json_path is not None:
        atomic_write(json_path, path.read_bytes())
    console.print(f"wrote {escape(str(path))}", highlight=False, soft_wrap=True)
    if robustness:
        from acutance.cli.robustness import robustness as measure

        measure(run, data_dir=data_dir, split=split, weights=weights, device=device)


def _scales(run: Path, several: bool) -> str:
    """The setting behind --multi-scale and --single-scale."""
    from acutance.lab.train.run import Run

    if (kind := Run(run).config().task.kind) != "segmentation":
        asked = "--multi-scale" if several else "--single-scale"
        raise AcutanceError(f"{asked} is for runs of segmentation; {run} is one of {kind}: leave it out")
    return f"task.multi_scale={str(several).lower()}"


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs; those of one group by seed.")],
    split: Annotated[str, typer.Option(help="test (evaluated before), or val.")] = "test",
    score: Annotated[str | None, typer.Option(help="Which score; by default the task's own.")] = None,
    weights: Annotated[str | None, typer.Option(help="Scores of the last or the best weights.")] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", help="Scores of evaluations of the first run with this field changed.")
    ] = None,
    robustness: Annotated[
        bool, typer.Option("--robustness", help="What `acutance robustness` measured, a line for each corruption.")
    ] = False,
    markdown_path: Annotated[Path | None, typer.Option("--markdown", help="Also write the table here.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write it here, with every score.")] = None,
) -> None:
    """Compare runs: those that differ in their seed only are one row, with mean ± standard deviation.

    Each row is also compared with the first over the seeds that both have, by an exact paired test: the share of all
    choices of signs of the differences whose mean is as far from 0. All scores must have come about in the same way,
    which is printed: the same weights, the same settings of the evaluation, the same precision.

    Examples: acutance compare runs/plain-seed* runs/neutreno-seed*

    acutance compare runs/plain-seed* runs/neutreno-seed* --robustness
    """
    from acutance.lab.evaluate.compare import compare as compared
    from acutance.lab.evaluate.evaluate import Weights
    from acutance.lab.evaluate.robust import compare_robustness

    chosen = cast(Weights | None, weights)
    body: Any
    if robustness and assignments:
        raise AcutanceError(
            "--robustness takes no --set: tables that came about in the same way are found by themselves"
        )
    if robustness:
        tables = compare_robustness(runs, split=split, score=score, weights=chosen or "last")
        table, body = "\n".join(found.to_markdown() for found in tables), [found.to_dict() for found in tables]
    else:
        one = compared(runs, split=split, score=score, weights=chosen, settings=assignments)
        table, body = one.to_markdown(), one.to_dict()
    console.print(escape(table), highlight=False, soft_wrap=True, end="")
    if markdown_path is not None:
        atomic_write(markdown_path, table.encode())
    if json_path is not None:
        atomic_write(json_path, json.dumps(body, indent=1, ensure_ascii=False).encode())
