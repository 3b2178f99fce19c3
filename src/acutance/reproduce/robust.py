"""Accuracy of a run on corrupted and attacked test images, read from `acutance.robustness`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from acutance.data import load_images
from acutance.reproduce.target import Row
from acutance.robustness import FGSM, PGD, SEVERITIES, RobustnessTable, evaluate

if TYPE_CHECKING:
    from acutance.reproduce.session import Session

PUBLISHED = "CIFAR-100-C"  # in the data folder: the published files, read where they are
EPSILON = 1.0  # of 255
ATTACKS: Mapping[str, FGSM | PGD] = {"fgsm": FGSM(EPSILON), "pgd": PGD(EPSILON)}
TINY_CORRUPTIONS = ("gaussian_noise", "contrast")


def robustness_values(session: Session, row: Row, seed: int) -> dict[str, float]:
    """By column: `clean`, `severity/3` (mean over the corruptions) or `attack/pgd`; what is measured is kept."""
    planned = session.planned(row, seed)
    columns = session.target.columns
    attacked = [ATTACKS[text.removeprefix("attack/")] for text in columns.values() if text.startswith("attack/")]
    corrupted = any(text.startswith("severity/") for text in columns.values())
    task = planned.config.task
    images = load_images(task.dataset, task.data_dir, "test")
    if session.scale == "tiny":
        images = images.subset(torch.arange(session.samples))
    folder = None if session.data_dir is None or session.scale == "tiny" else session.data_dir / PUBLISHED
    options = {"corruptions": TINY_CORRUPTIONS} if session.scale == "tiny" else {}
    table = evaluate(
        session.model(row, seed),
        images,
        **(options if corrupted else {"corruptions": ()}),
        severities=SEVERITIES,
        attacks=attacked,
        path=planned.run.folder / f"{session.target.name}.json",
        corrupted_dir=folder if corrupted and folder is not None and folder.is_dir() else None,
        context={"name": planned.label},
    )
    return {column: _value(table, text) for column, text in columns.items()}


def _value(table: RobustnessTable, text: str) -> float:
    kind, _, name = text.partition("/")
    if kind == "severity":
        mean = table.mean(severity=int(name))
        assert mean is not None, "every cell was measured"
        return mean
    return table[ATTACKS[name].name if kind == "attack" else kind]
