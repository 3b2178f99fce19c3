"""reproduce: train what a target needs, measure, and put it beside what was published."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import torch
from rich.console import Console
from rich.markup import escape
from torch import Tensor, nn

from acutance import distributed as processes
from acutance.errors import AcutanceError
from acutance.files.atomic import atomic_write
from acutance.io.saving import load
from acutance.lab.data.seeds import mixed_seed
from acutance.lab.evaluate.evaluate import evaluate_run, read_evaluation, task_of
from acutance.lab.reproduce import tiny
from acutance.lab.reproduce.needs import check_data
from acutance.lab.reproduce.plan import Planned, Planner, Share, mine
from acutance.lab.reproduce.report import Result
from acutance.lab.reproduce.target import Row, Target
from acutance.lab.tasks.samples import samples
from acutance.lab.train.run import command_line, git_state, hardware, versions

Scale = Literal["full", "tiny"]
HINT = "# One run over 8 GPUs: add --processes 8, or write torchrun --nproc-per-node 8 -m before a command."


class Session:
    """One target, its runs below one folder, and what its measures read.

    Args:
        target: the table or figure.
        out: `out/runs` has the runs, which all targets share, `out/TARGET` the results.
        data_dir: where the data is; not read at tiny scale.
        seeds: runs for each row, numbered from 0; by default the target's own number, at tiny scale one.
        scale: "tiny" does everything on stand-ins in seconds.
        changes: fields changed in every run, as --set takes them; they are written down with the result.
        samples: images or sequences on which models are read.
        device: cpu, cuda or auto.
        console: where progress is shown.
    """

    def __init__(
        self,
        target: Target,
        out: Path | str,
        *,
        data_dir: Path | str | None = None,
        seeds: int | None = None,
        scale: Scale = "full",
        changes: tuple[str, ...] = (),
        samples: int = 1000,
        device: str = "auto",
        console: Console | None = None,
    ) -> None:
        if scale not in get_args(Scale):
            raise AcutanceError(f"scale is one of {', '.join(get_args(Scale))}, not {scale!r}")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise AcutanceError(
                "reproduce is one process: start it once for each GPU (CUDA_VISIBLE_DEVICES=0, 1, …), and they will "
                "share the runs; or train single runs under torchrun by the commands that --plan prints, and reproduce "
                "will find them finished"
            )
        self.target, self.scale, self.changes = target, scale, changes
        self.seeds = range(seeds or (1 if scale == "tiny" else target.seeds))
        root = Path(out) / "tiny" if scale == "tiny" else Path(out)
        self.folder = root / target.name
        self.samples = tiny.SAMPLES if scale == "tiny" else samples
        self.device = "cpu" if scale == "tiny" else processes.device(device)
        self._chosen_device = "cpu" if scale == "tiny" else device
        self.console = console or Console()
        self.data_dir = None if data_dir is None else Path(data_dir)
        shrink = partial(tiny.shrink, folder=root / "stand-ins")
        self.planner = Planner(
            root / "runs",
            None if scale == "tiny" else self.data_dir,
            changes,
            shrink if scale == "tiny" else lambda config: config,
        )
        self.plan = self.planner.plan(target.trainings, self.seeds)

    def run(self, share: Share | None = None) -> Result:
        """Train this share of what is left and nobody else trains, then measure all that is finished."""
        from acutance.lab.reproduce.measures import MEASURES

        self._check_runs()
        own = mine(self.plan, share)
        check_data(planned.config for planned in own if planned.is_open)
        while self._train(own):
            pass  # once more: what others held up may be possible now
        self._check_runs()
        pending = self.pending()
        sheets = MEASURES[self.target.measure](self)
        record = {
            "changes": list(self.changes),
            "samples": self.samples,
            "command": command_line(),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": versions(),
            "hardware": hardware(),
            "git": git_state(),
            "runs": {planned.label: planned.state for planned in self.plan},
        }
        return Result(self.target, self.scale, len(self.seeds), tuple(sheets), pending, record)

    def _check_runs(self) -> None:
        """Those that others train are read too, and must be of the same settings."""
        for planned in self.plan:
            planned.check()

    def _train(self, own: Sequence[Planned]) -> bool:
        """All that can be trained now, in order; says whether there was any."""
        quiet = Console(quiet=True) if self.scale == "tiny" else self.console
        some = False
        for number, planned in enumerate(own, 1):
            if not planned.is_open:
                continue
            with planned.taken() as other:
                if other is not None:
                    self._say(f"[{number}/{len(own)}] {planned.label} is being trained by {other}")
                elif planned.is_open and (planned.base is None or planned.base.state == "finished"):
                    self._say(f"[{number}/{len(own)}] {planned.label}")
                    planned.train(self._chosen_device, quiet)
                    some = True
        return some

    def _say(self, words: str) -> None:
        self.console.print(escape(words), highlight=False, soft_wrap=True)

    def pending(self) -> tuple[str, ...]:
        """The runs that are not finished."""
        return tuple(planned.label for planned in self.plan if planned.is_open)

    def write(self, result: Result) -> list[Path]:
        """The result as Markdown and as JSON; not a part of it, if another process has the whole by now."""
        if result.pending and not self.pending():
            return []
        body = json.dumps(result.to_dict(), indent=1, ensure_ascii=False, allow_nan=False)
        return [
            atomic_write(self.folder / "result.md", result.to_markdown().encode()),
            atomic_write(self.folder / "result.json", body.encode()),
        ]

    def script(self, share: Share | None = None) -> str:
        """What would be run, as a shell script: how each run of this share could be trained by itself."""
        lines = [HINT]
        for planned in mine(self.plan, share):
            command = planned.command()
            lines += [f"# {planned.label}: {planned.state}", *([] if command is None else [command])]
        return "\n".join(lines)

    def planned(self, row: Row, seed: int) -> Planned:
        """The run behind a row."""
        assert row.training is not None, "a pretrained model has no run"
        return self.planner.one(row.training, seed)

    def why_missing(self, row: Row) -> str:
        """Why a row lacks seeds, in words; nothing if it does not."""
        if row.training is None or row.state == "initial":
            return ""
        runs = {seed: self.planned(row, seed) for seed in self.seeds}
        words = [f"seed {seed} {run.state}" for seed, run in runs.items() if run.state != "finished"]
        return ", ".join(words)

    def ready(self, row: Row) -> list[int]:
        """The seeds at which a row can be read."""
        if row.state == "initial":
            return list(self.seeds)
        return [seed for seed in self.seeds if self.planned(row, seed).state == "finished"]

    def scores(self, row: Row, seed: int, split: str, settings: tuple[str, ...]) -> Mapping[str, float]:
        """A run's scores on a split, evaluated unless they were."""
        folder = self.planned(row, seed).run.folder
        found = read_evaluation(folder, split, settings=settings)
        if found is None:
            data_dir = None if self.scale == "tiny" else self.data_dir
            found = evaluate_run(folder, split=split, data_dir=data_dir, settings=settings, device=self._chosen_device)
        return found.scores

    def model(self, row: Row, seed: int) -> nn.Module:
        """A row's model, trained or as drawn, on the device."""
        planned = self.planned(row, seed)
        if row.state == "trained":
            return load(planned.run.model_path).to(self.device)
        task = task_of(planned.config, "cpu")
        torch.manual_seed(mixed_seed(seed))
        return task.build_model().to(self.device)

    def inputs(self, row: Row, split: str) -> list[Tensor]:
        """Samples for a row's model; measures move them to the device."""
        return samples(self.planned(row, 0).config, split, self.samples)

    def path(self, *words: str) -> Path:
        """A file's stem among the results, made of words."""
        return self.folder / "-".join(re.sub(r"[^\w.]+", "-", word).strip("-") for word in words)


def reproduce(target: Target, out: Path | str, *, share: Share | None = None, **options: object) -> Result:
    """`Session(target, out, **options).run(share)`, written down too."""
    session = Session(target, out, **options)  # type: ignore[arg-type]
    result = session.run(share)
    session.write(result)
    return result
