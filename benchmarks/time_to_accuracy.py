"""How long training took: the time of whole runs with their test scores, and the time to a held-out score.

    python benchmarks/time_to_accuracy.py runs/cifar100-*seed0 --reach 70 --reach 74
    python benchmarks/time_to_accuracy.py runs/cifar100-train_on=all-seed* --out benchmarks/results/time_to_accuracy.csv

Seconds are those in a run's log.jsonl. They count from the start of the loop, and include compilation, evaluation and
saving. Held-out scores are from evaluations during training (`loop.evaluate_every`). A run on the whole training set
has no valid held-out score; its whole time is given with its score on the test set (`acutance evaluate`).
"""

import argparse
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from acutance.errors import AcutanceError
from acutance.files.atomic import read_json
from acutance.lab.bench.results import Row, command, write_rows
from acutance.lab.evaluate.evaluate import read_evaluations
from acutance.lab.tasks import task_class
from acutance.lab.train.log import read_log
from acutance.lab.train.run import FORMAT, Run


def row(folder: Path, reach: list[float]) -> Row:
    run = Run(folder)
    config, sessions = run.config(), read_json(run.record_path, FORMAT, lambda body: body["sessions"])
    if len(sessions) > 1:
        raise AcutanceError(f"{folder} was interrupted and resumed: its log does not say how long it took in all")
    log, task = read_log(folder), task_class(config.task.kind)
    held_out = getattr(config.task, "train_on", "train") == "train"
    scored = [(line["seconds"], line[name]) for line in log if (name := f"val/{task.headline}") in line and held_out]
    hardware = sessions[0]["hardware"]
    return {
        "run": folder.name,
        "mitigation": getattr(config.task.model, "mitigation", None) or "none",
        "seed": config.loop.seed,
        "epochs": config.loop.epochs,
        "finished": run.result() is not None,
        "seconds": f"{log[-1]['seconds']:.1f}",
        "median_speed": f"{statistics.median(line[f'{task.unit}/s'] for line in log):.0f}",
        f"test_{task.headline}": test_score(folder, task.headline),
        f"held_out_{task.headline}": f"{scored[-1][1]:.2f}" if scored else "",
        **{f"seconds_to_{wanted:g}": first_time(scored, wanted, task) for wanted in reach},
        "device": ", ".join(hardware["gpus"]) or f"{hardware['machine']} CPU",
        "versions": versions_of(sessions[0]),
    }


def versions_of(session: Mapping[str, Any]) -> str:
    """The recorded versions of everything that affects speed; a CPU run has neither CUDA nor Triton."""
    found = {**session["versions"], "cuda": session["hardware"].get("cuda")}
    return ", ".join(f"{name} {found[name]}" for name in ("python", "torch", "cuda", "triton") if found.get(name))


def test_score(folder: Path, name: str) -> str:
    """The score of the last weights, with the recipe's own settings."""
    found = [e.scores[name] for e in read_evaluations(folder, "test") if e.weights == "last" and not e.settings]
    return f"{found[0]:.2f}" if found else ""


def first_time(scored: list[tuple[float, float]], wanted: float, task: Any) -> str:
    """Seconds until an evaluation first gave a score as good as this; empty if none did."""
    sign = 1 if task.higher_is_better else -1
    return next((f"{seconds:.1f}" for seconds, score in scored if sign * score >= sign * wanted), "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--reach", type=float, action="append", default=[], help="a held-out score; can be repeated")
    parser.add_argument("--out", type=Path, help="also write a CSV here")
    arguments = parser.parse_args()
    rows = [row(folder, arguments.reach) for folder in arguments.runs]
    for found in rows:
        print("  ".join(f"{name} {value}" for name, value in found.items() if value != ""))
    if arguments.out is not None:
        how = command("python benchmarks/time_to_accuracy.py", sys.argv[1:], without="--out")
        print(f"wrote {write_rows(arguments.out, rows, {'command': how})}")


if __name__ == "__main__":
    main()
