"""`acutance robustness`."""

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from acutance.cli.options import DataDir, Device, Markdown, Weights, console, ints, option, say, stoppable, words, write
from acutance.errors import AcutanceError


def robustness(
    run: Annotated[Path, typer.Argument(help="The folder of a run that `acutance train` made, of a classifier.")],
    data_dir: DataDir = None,
    corruptions: Annotated[str, option("Comma-separated names, all or none.")] = "all",
    severities: Annotated[str, option("Comma-separated, from 1 to 5.")] = "1,2,3,4,5",
    attacks: Annotated[str, option("fgsm:ε and pgd:ε:steps:size, in levels of 255, or none.")] = "fgsm:1,pgd:1",
    corrupted_dir: Annotated[Path | None, option("The published CIFAR-10-C or CIFAR-100-C.")] = None,
    split: Annotated[str, option("test, or val to choose by.")] = "test",
    weights: Weights = "last",
    limit: Annotated[int | None, option("Only so many images; of ImageNet some of each class.", min=1)] = None,
    seed: Annotated[int, option("Of what is drawn.")] = 0,
    device: Device = "auto",
    json_path: Annotated[Path | None, option("The table.", "--json", show_default="RUN/robustness….json")] = None,
    markdown_path: Markdown = None,
) -> None:
    """Measure 19 corruptions at 5 severities, FGSM and PGD. Stopped, the same command goes on.

    `acutance compare --robustness` puts the tables of several runs side by side.

    Example: acutance robustness runs/digits-seed0 --corruptions fog,contrast --attacks fgsm:8,pgd:8:20
    """
    from acutance.distributed import device as device_of
    from acutance.io.saving import load
    from acutance.lab.evaluate.evaluate import refuse_seen, weights_path
    from acutance.lab.robustness import CORRUPTIONS, evaluate, images_of, table_name
    from acutance.lab.train.run import Run

    config = Run(run).config()
    if weights not in ("last", "best"):
        raise AcutanceError(f"--weights are last or best, not {weights!r}")
    chosen = cast(Any, weights)
    refuse_seen(run, config, split, chosen)
    images = images_of(config.task, split, data_dir=data_dir, limit=limit)
    target = json_path or run / table_name(split, weights, corrupted_dir)
    options: dict[str, Any] = {
        "corruptions": {"all": list(CORRUPTIONS), "none": []}.get(corruptions.strip(), words(corruptions)),
        "severities": ints(severities, "--severities"),
        "attacks": [] if attacks.strip() == "none" else words(attacks),
        "context": {"name": run.name, "split": split, "which": weights},
    }
    with stoppable():
        model = load(weights_path(run, chosen)).to(device_of(device))
        table = evaluate(model, images, seed=seed, path=target, corrupted_dir=corrupted_dir, progress=True, **options)
    console.print(table.table())
    say(f"wrote {target}")
    write(markdown_path, table.markdown().encode())
