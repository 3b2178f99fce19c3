"""The jobs of a queue: its file, its jobs in order, and the key by which a job's result is found.

A key is a digest of all that defines a run. It must survive refactoring: a field added later does not change the key
while it has its neutral value.
"""

import hashlib
import json
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from acutance.errors import AcutanceError
from acutance.files.atomic import read_bytes
from acutance.lab import recipes
from acutance.lab.train.config import Config, from_dict, incidental_fields, override

FORMAT = "acutance-queue/1"
VERSION = 1  # of definitions
# Neutral values: fields that have them are left out of a definition. Never change or remove an entry, since that would
# orphan results. Add a new field of a configuration here, with the value that leaves runs as they were.
WORDS = """
    task.model.in_chans=3 task.model.mlp_ratio=4.0 task.model.qkv_bias=true task.model.attention="softmax"
    task.model.mitigation=null task.model.mitigation_layers=null task.model.class_token=true task.model.distilled=false
    task.model.registers=0 task.model.norm="pre" task.model.layer_scale=null task.model.drop_path=0.0
    task.model.dropout=0.0 task.model.attention_dropout=0.0 task.model.stream="float32" task.train_on="train"
    task.fraction=1.0 task.augment.crop_pad=0 task.augment.flip=0.0 task.augment.rand_layers=0
    task.augment.rand_magnitude=9.0 task.augment.rand_magnitude_std=0.5 task.augment.rand_probability=0.5
    task.augment.erase=0.0 task.augment.mixup=0.0 task.augment.cutmix=0.0 task.augment.switch=0.5
    task.augment.mix_probability=1.0 task.augment.smoothing=0.0 task.repeats=1 task.weights=null task.xavier=false
    task.depth_scaled=false optim.betas=[0.9,0.999] optim.eps=1e-08 optim.momentum=0.9 optim.clip=null
    schedule.warmup=0.0 schedule.start=0.0 schedule.final=0.0 schedule.power=0.9 schedule.per="step"
    schedule.warmup_inside=false loop.precision="fp32" loop.ema=null
"""
NEUTRAL = frozenset(WORDS.split())

Kind = Literal["tune", "final"]


@dataclass(frozen=True)
class Row:
    """One configuration: fields that differ from its block's, as --set takes them."""

    label: str
    set: tuple[str, ...] = ()
    seconds: float | None = None  # expected time of one run by itself, if it differs from the block's
    keep: bool = False  # keep the weights of the block's first seed, as an example


@dataclass(frozen=True)
class Block:
    """The rows of one table. `tune` reads only the held-out slice; `final` reads the test set once per row and seed."""

    name: str
    title: str
    kind: Kind
    recipe: str
    seeds: tuple[int, ...]
    seconds: float  # expected time of one run by itself; earlier results take precedence
    row: tuple[Row, ...]
    set: tuple[str, ...] = ()
    note: str = ""

    def jobs(self) -> Iterator["Job"]:
        """All jobs, seed by seed, so that rows can be paired early."""
        for seed in self.seeds:
            yield from (Job(self, row, seed) for row in self.row)


@dataclass(frozen=True)
class Job:
    """One run: a row and a seed."""

    block: Block
    row: Row
    seed: int

    @cached_property
    def config(self) -> Config:
        plain = recipes.load(self.block.recipe)
        held = [f"task.train_on={'train' if self.block.kind == 'tune' else 'all'}"]
        last = [f"loop.seed={self.seed}", *(held if hasattr(plain.task, "train_on") else [])]
        return override(plain, [*self.block.set, *self.row.set, *last])

    @cached_property
    def definition(self) -> dict[str, Any]:
        """All that defines the run, as plain data without neutral fields."""
        found = {"version": VERSION, "kind": self.block.kind, "task.kind": self.config.task.kind}
        incidental = incidental_fields(self.config)
        for name, value in _flat(self.config.to_dict()):
            word = f"{name}={json.dumps(value, separators=(',', ':'))}"
            if name not in incidental and name != "task.kind" and word not in NEUTRAL:
                found[name] = value
        return found

    @cached_property
    def key(self) -> str:
        return digest_of(self.definition)

    @property
    def label(self) -> str:
        return f"{self.block.name}: {self.row.label}, seed {self.seed}"

    @property
    def seconds(self) -> float:
        """The expected time by the queue's file."""
        return self.block.seconds if self.row.seconds is None else self.row.seconds


@dataclass(frozen=True)
class Queue:
    """Blocks in the order in which they are run."""

    block: tuple[Block, ...]

    @classmethod
    def load(cls, path: Path) -> "Queue":
        """Read a TOML file. Mistakes in it are refused before anything runs."""
        try:
            body = tomllib.loads(read_bytes(path).decode())
        except ValueError as error:
            raise AcutanceError(f"{path} is not a TOML file: {error}") from error
        if (form := body.pop("format", None)) != FORMAT:
            raise AcutanceError(f"{path}: format {form!r}, this version reads {FORMAT!r}")
        queue: Queue = from_dict(cls, body)
        queue.check(path)
        return queue

    def jobs(self) -> list[Job]:
        """All jobs in order. A job that several blocks share comes once."""
        found: dict[str, Job] = {}
        for job in (job for block in self.block for job in block.jobs()):
            found.setdefault(job.key, job)
        return list(found.values())

    def job(self, key: str) -> Job:
        for job in self.jobs():
            if job.key == key:
                return job
        raise AcutanceError(f"the queue has no job {key}")

    def check(self, path: Path) -> None:
        """Refuse repeated names, rows that are the same run, and tuning on the seeds of a final block."""
        names = Counter(block.name for block in self.block)
        if twice := [name for name, count in names.items() if count > 1]:
            raise AcutanceError(f"{path}: two blocks are called {twice[0]!r}")
        for block in self.block:
            rows: dict[str, str] = {}
            for row in block.row:
                if (other := rows.setdefault(Job(block, row, block.seeds[0]).key, row.label)) != row.label:
                    raise AcutanceError(f"{path}: {block.name} has {other!r} and {row.label!r}, which are the same run")
        opened = {(block.recipe, seed): block for block in self.block if block.kind == "final" for seed in block.seeds}
        for block in self.block:
            seeds = [seed for seed in block.seeds if (block.recipe, seed) in opened]
            if block.kind == "tune" and seeds:
                final = opened[block.recipe, seeds[0]].name
                raise AcutanceError(f"{path}: {block.name} tunes on seed {seeds[0]}, which {final} tests: take another")


def digest_of(definition: Mapping[str, Any]) -> str:
    """The first 16 hexadecimal digits of a SHA-256 over the sorted definition."""
    text = json.dumps(definition, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
