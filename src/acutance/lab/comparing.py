"""`acutance compare`: profiles and models by what was measured, runs by their scores."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from acutance.cli import options as shared
from acutance.cli.options import option, say, spread, write
from acutance.cli.verbs import MeasureOptions, show
from acutance.errors import AcutanceError
from acutance.lab.commands import Markdown, Split


@spread
def compare(
    what: Annotated[list[str], typer.Argument(metavar="WHAT...", help="Profiles (.json), models, or folders of runs.")],
    options: MeasureOptions,
    split: Split = "test",
    score: Annotated[str | None, option("Which score; by default the task's own.")] = None,
    weights: Annotated[str | None, option("Scores of the last or the best weights.")] = None,
    assignments: Annotated[list[str] | None, option("Scores of evaluations with this field changed.", "--set")] = None,
    robustness: Annotated[bool, option("Compare results of `acutance robustness`.", "--robustness")] = False,
    data: Annotated[str | None, option("Measure runs, on the digits or each on its own test data.")] = None,
    markdown_path: Markdown = None,
    json_path: shared.JSON = None,
    html_path: shared.HTML = None,
) -> None:
    """Compare anything: what was measured of profiles, diagnoses and models, or the scores of runs.

    Every profile is compared with the first, layer by layer, with 95 % intervals, over pairs of samples where both have
    read the same ones. Models are measured first, on --text, --images or their own data.

    Folders of runs alone are compared by their scores; with --data own they are measured instead. Runs that differ only
    in their seed form a row, with mean ± standard deviation.

    Each row is also compared with the first, over the seeds that both have, by an exact paired sign-flip test. Its p is
    the share of all sign choices for the differences whose mean is at least as far from 0. All scores must have been
    computed in the same way, which is printed: the same weights, evaluation settings and precision.

    Examples: acutance compare plain.json steered.json --html difference.html

    acutance compare hf:gpt2 hf:distilgpt2 --text wiki.test.txt --limit 64

    acutance compare runs/plain-seed* runs/neutreno-seed*
    """
    about_scores: dict[str, Any] = {"split": split, "score": score, "weights": weights, "settings": assignments}
    named = [one for one in what if Path(one).suffix in (".json", ".safetensors") or ":" in one]
    is_read = data is not None or any(getattr(options, f.name) != f.default for f in fields(options))
    if not named and not is_read:
        if html_path is not None:
            raise AcutanceError("--html draws what is measured: give --data own to measure runs, or leave out --html")
        compare_runs([*map(Path, what)], about_scores, robustness, markdown_path, json_path)
        return
    if (split, score, weights, assignments, robustness, markdown_path) != ("test", None, None, None, False, None):
        asked = f"{named[0]} is compared" if named else "with options on data they are compared"
        raise AcutanceError(f"options on scores are for folders of runs alone: {asked} by what is measured")
    if len(what) < 2:
        raise AcutanceError(f"compare takes two or more, got {what[0]} alone")
    for model in [one for one in what if not one.endswith(".json")]:
        options.check(model)
    from acutance.diagnose.compare import read_profile, with_quality
    from acutance.diagnose.quality import measure_quality
    from acutance.measure.comparison import compared

    def measured(model: str) -> tuple[Any, Any]:
        if model.endswith(".json"):
            return read_profile(model), None
        loaded = options.load(model, head=True)
        batches = options.batches(loaded, data)
        return options.profile(loaded, batches), measure_quality(loaded.model, batches)

    profiles, qualities = zip(*map(measured, what), strict=True)
    show(with_quality(compared(*profiles), qualities), json_path, html_path)


def compare_runs(
    runs: list[Path], how: dict[str, Any], robustness: bool, markdown_path: Path | None, json_path: Path | None
) -> None:
    """Print and write the scores of runs."""
    from acutance.lab.evaluate.compare import compare as compared
    from acutance.lab.evaluate.compare import compare_robustness

    if robustness and how.pop("settings"):
        raise AcutanceError("--robustness takes no --set: it finds tables that were measured in the same way")
    found: list[Any] = compare_robustness(runs, **how) if robustness else [compared(runs, **how)]
    table, bodies = "\n".join(one.to_markdown() for one in found), [one.to_dict() for one in found]
    say(table, end="")
    write(markdown_path, table.encode())
    write(json_path, json.dumps(bodies if robustness else bodies[0], indent=1, ensure_ascii=False).encode())
