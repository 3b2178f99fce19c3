"""What a sweep found: a trial per remedy, the table sorted by quality, and the sentence that says what is worth it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from acutance.diagnose.quality import Change, Quality
from acutance.report.tables import FittedTable, Result, to_plain

CONTROL = "none"  # the spec of the model without a remedy


@dataclass(frozen=True)
class Reading:
    """One model: its qualities, the headline first, and the token cosine after its last block."""

    qualities: tuple[Quality, ...]
    cosine: float

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Self:
        lists = ("values", "weights")
        found = (Quality(**one | {name: tuple(map(float, one[name])) for name in lists}) for one in body["qualities"])
        return cls(tuple(found), float(body["cosine"]))


@dataclass(frozen=True)
class Trial:
    """One remedy in a copy of the model; or the reason why it cannot work there."""

    spec: str
    reason: str = ""
    note: str = ""  # what the reader should know
    added: int = 0  # parameters
    start: Reading | None = None  # as installed
    end: Reading | None = None  # after fine-tuning; the same without
    time: float = 1.0  # of a forward pass, as a ratio to the model without the remedy
    memory: float | None = None  # the same of its peak, on a GPU

    @property
    def quality(self) -> Quality | None:
        """The headline."""
        return self.end.qualities[0] if self.end is not None and self.end.qualities else None

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Self:
        read = {name: body[name] and Reading.from_dict(body[name]) for name in ("start", "end")}
        return cls(**{**body, **read})


@dataclass(frozen=True)
class Sweep(Result):
    """The trials in the order in which they were made; the first is the control, the model without a remedy.

    Its `start` is the untouched model, its `end` the same after plain fine-tuning.
    """

    FORMAT = "acutance-sweep/1"
    INDENT = None
    trials: tuple[Trial, ...]
    context: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, spec: str) -> Trial:
        return next(trial for trial in self.trials if trial.spec == spec)

    @property
    def control(self) -> Trial:
        return self.trials[0]

    @property
    def steps(self) -> int:
        """Of the fine-tune."""
        return int(self.context.get("fine_tune", {}).get("steps", 0))

    def change(self, trial: Trial, level: float = 0.95) -> Change | None:
        """In quality, against the control after the same fine-tune."""
        if self.control.quality is None or trial.quality is None or trial is self.control:
            return None
        return self.control.quality.change(trial.quality, level)

    def sorted(self) -> list[Trial]:
        """The best quality first, or the smallest cosine where quality was not measured; what failed last."""

        def key(trial: Trial) -> tuple[bool, float]:
            if trial.end is None:
                return True, 0.0
            quality = trial.quality
            return False, trial.end.cosine if quality is None else quality.mean * (-1) ** quality.higher_is_better

        return sorted(self.trials, key=key)

    def verdict(self) -> str:
        """Whether any remedy is worth it, in one sentence."""
        tried = [trial for trial in self.trials[1:] if trial.end is not None]
        if self.control.quality is None:
            return "Quality was not measured, so no remedy can be called worth it."
        if not tried:
            return "None is worth it here: no remedy could be tried."
        name = self.control.quality.name
        against = "plain fine-tuning" if self.steps else "the untouched model"
        found = {trial.spec: self.change(trial, 1 - 0.05 / len(tried)) for trial in self.sorted() if trial in tried}
        better, worse = ([s for s, c in found.items() if c and c.verdict == v] for v in ("better", "worse"))
        compared = f"compared with {against}, by intervals that allow for {len(tried)} comparisons"
        if better:
            of = f"{len(worse)} of {len(tried)} worsened it"
            return f"Worth it here: {', '.join(better)} improved {name}; {of} ({compared})."
        return (
            f"None is worth it here: of {len(tried)}, none improved {name} and {len(worse)} worsened it ({compared})."
        )

    def rows(self) -> list[dict[str, Any]]:
        found = []
        for trial in self.sorted():
            change, quality = self.change(trial), trial.quality
            row: dict[str, Any] = {"remedy": trial.spec, "quality": quality and quality.name}
            for name, reading in {"start": trial.start, "end": trial.end}.items():
                row |= {f"{name}_quality": reading.qualities[0].mean if reading and reading.qualities else None}
                row |= {f"{name}_cosine": reading.cosine if reading else None}
            row |= {"change": change and change.value, "low": change and change.low, "high": change and change.high}
            found.append(row | {name: getattr(trial, name) for name in ("added", "time", "memory", "note", "reason")})
        return found

    def table(self) -> FittedTable:
        return FittedTable(
            self.title, [self._row(trial) for trial in self.sorted()], self.caption, ("remedy",), ("remedy",), "note"
        )

    def _row(self, trial: Trial) -> dict[str, str]:
        first, quality, change = self.control.start, trial.quality, self.change(trial)
        row = {"remedy": trial.spec if trial is not self.control else "(none)"}
        if self.control.quality is not None and first is not None:
            name, as_installed = self.control.quality.name, trial.start and trial.start.qualities[0]
            if self.steps:
                row[f"{name} at once"] = f"{as_installed.mean:,.4g}" if as_installed else ""
            row[name] = f"{quality.mean:,.4g}" if quality else ""
            row["change (95 %)"] = str(change or "")
        row["cosine"] = f"{trial.end.cosine:.3f}" if trial.end else ""
        cosine = self.control.end.cosine if self.control.end else 0.0
        row["its change"] = f"{trial.end.cosine - cosine:+.3f}" if trial.end and trial is not self.control else ""
        row["parameters"] = f"{trial.added:+,}" if trial.end else ""
        row["time"] = f"{trial.time:.2f}" if trial.end else ""
        if any(one.memory is not None for one in self.trials):
            row["memory"] = "" if trial.memory is None else f"{trial.memory:.2f}"
        return row | {"note": trial.reason or trial.note}

    @property
    def title(self) -> str:
        return f"remedies in {self.context.get('name', self.context.get('model', 'a model'))}"

    @property
    def caption(self) -> str:
        """What was measured on what, in one line."""
        about = self.control.quality.about if self.control.quality else ""
        told = [f"{self.control.quality.name} {about}".strip() if self.control.quality else "quality not measured"]
        told.append(
            "changes are against the row (none); cosine: of tokens after the last block; time: of a forward pass"
        )
        told += [str(self.context[key]) for key in ("data", "split") if key in self.context]
        return "; ".join(
            [*told, *(f"{key}: {self.context[key]}" for key in ("dtype", "device") if key in self.context)]
        )

    def __str__(self) -> str:
        return f"{self.table()}\n{self.verdict()}\n"

    def content(self) -> dict[str, Any]:
        return {"trials": to_plain([asdict(trial) for trial in self.trials]), "verdict": self.verdict()}

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Self:
        return cls(tuple(map(Trial.from_dict, body["trials"])), dict(body["context"]))
