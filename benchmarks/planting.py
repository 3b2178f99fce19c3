"""Plants each fault that `diagnose` knows into models, at three doses, and counts what is found and what is not.

    python benchmarks/planting.py choose:minilm=hf:MINILM@wiki.test.tokens try:plain=acutance-demo/plain-seed0

Thresholds were chosen from the half `choose`, and the tables are about the half `try`. A real model is HALF:NAME=MODEL,
with @TEXT if it reads text. Models made here, with random weights and sharp attention, join them. Writes planting.csv
and planting.json into docs/evidence/diagnose.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import acutance as ac
from acutance import sites
from acutance.attention import AttentionCall
from acutance.diagnose.findings import DETECTORS, findings, score
from acutance.diagnose.readings import Readings, read
from acutance.lab.bench.results import Row, command, write_rows
from acutance.lab.files import finite
from acutance.lab.train.provenance import made
from acutance.mitigations import Mitigation

EVIDENCE = Path(__file__).parents[1] / "docs" / "evidence" / "diagnose"
SAMPLES, TOKENS, CHOSEN = 16, 64, 3  # read of each model; and which token becomes an outlier
LARGE = 10**8  # parameters
SAID: list[dict[str, Any]] = []  # what `diagnose` says of the real models as they are


class Fault(NamedTuple):
    """What is planted, and the finding that must tell it."""

    finding: str
    doses: tuple[float, float, float]
    where: str  # layers: every, two, middle, or last
    has: str = ""  # models that have it without our doing, which are neither planted nor taken as free of it


FAULTS = {
    "tokens mixed with their mean": Fault("tokens alike", (0.5, 0.8, 0.95), "middle"),
    "branch mixed with its mean": Fault("constant attention branch", (0.5, 0.8, 0.95), "every"),
    "a common vector at the end": Fault("embeddings alike", (0.5, 2, 8), "last", "smollm2 gpt2 bert"),
    "keys of the first token": Fault("attention sink", (2, 4, 8), "every", "smollm2 minilm"),
    "one token made longer": Fault("outlier tokens", (4, 16, 64), "middle", "smollm2"),
    "patches exchanged": Fault("patches rewired", (0.25, 0.5, 1), "middle"),
    "blocks that add less": Fault("idle layers", (0.5, 0.8, 0.95), "two"),
    "a head that adds less": Fault("idle heads", (0.5, 0.8, 0.98), "middle"),
    "a head made another's twin": Fault("idle heads", (0.5, 0.8, 0.95), "middle"),
    "logits of the token itself": Fault("attention to itself", (2, 4, 8), "every"),
    "W_proj turned to W_V's transpose": Fault("smoothing weights", (0.3, 0.6, 0.9), "every", "smollm2"),
    "queries made shorter": Fault("even attention", (0.5, 0.8, 0.98), "every"),
}


class Planted(Mitigation):
    """One fault, as a mitigation: whatever model it is, the hooks are the same."""

    def __init__(self, fault: str = "", dose: float = 0.0) -> None:
        super().__init__()
        self.fault, self.dose = fault, dose

    def scores(self, q: Any, k: Any, call: AttentionCall) -> Any:
        if self.fault == "queries made shorter":
            return q * (1 - self.dose), k, None
        bias = q.new_zeros(1, 1, q.shape[2], k.shape[2])
        if self.fault == "logits of the token itself":
            bias = bias + self.dose * torch.eye(q.shape[2], device=q.device, dtype=q.dtype)
        elif self.fault == "keys of the first token":
            bias[..., 0] = self.dose
        else:
            return q, k, None
        return q, k, bias

    def output(self, u: Tensor, w: Tensor, call: AttentionCall) -> Tensor:
        heads = u.unbind(1)
        if self.fault == "a head that adds less":
            return torch.stack([heads[0] * (1 - self.dose), *heads[1:]], 1)
        if self.fault == "a head made another's twin":
            return torch.stack([torch.lerp(heads[0], heads[1], self.dose), *heads[1:]], 1)
        return u

    def features(self, y: Tensor, call: AttentionCall) -> Tensor:
        return torch.lerp(y, y.mean(1, keepdim=True), self.dose) if self.fault.startswith("branch") else y

    def stream(self, x_in: Tensor, x_out: Tensor, call: AttentionCall) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        if self.fault == "tokens mixed with their mean":
            return torch.lerp(x_out, x_out.mean(1, keepdim=True), self.dose)
        if self.fault == "a common vector at the end":
            common = torch.randn(x_out.shape[-1], generator=generator).to(x_out)
            return x_out + self.dose * x_out.norm(dim=-1, keepdim=True) * common / common.norm()
        if self.fault == "blocks that add less":
            return torch.lerp(x_out, x_in, self.dose)
        x_out = x_out.clone()
        if self.fault == "one token made longer":
            x_out[:, CHOSEN] *= self.dose
        elif self.fault == "patches exchanged":
            moved = torch.randperm(x_out.shape[1] - 1, generator=generator)[: round(self.dose * (x_out.shape[1] - 1))]
            x_out[:, 1 + moved] = x_out[:, 1 + moved.roll(1)]
        return x_out


@contextmanager
def planted(model: nn.Module, fault: str, dose: float) -> Iterator[None]:
    """The model with the fault in it, for the time of a with block."""
    found = sites.find(model)
    middle, where = 2 * len(found) // 3 + 1, FAULTS[fault].where
    two = [layer for layer in (middle, middle + 1) if layer <= len(found)]  # ALBERT's layers are one
    layers = {"every": None, "two": two, "middle": [middle], "last": [len(found)]}[where]
    changed: list[tuple[Tensor, Tensor]] = []
    if fault.startswith("W_proj"):  # so that H = W_proj W_V has positive eigenvalues
        for site in found:
            weight, value = site.projection_weight(), site.value_weight()
            changed.append((weight, weight.detach().clone()))
            with torch.no_grad():
                weight.lerp_(value.T * weight.norm() / value.norm(), dose)
    if fault == "a head made another's twin":  # which also needs the other's columns of W_proj
        site = found[middle - 1]
        columns = site.projections().output.matrix().unflatten(1, (site.heads, -1))
        changed.append((columns, columns.detach().clone()))
        with torch.no_grad():
            columns[:, 0] = torch.lerp(columns[:, 0], columns[:, 1], dose)
    handle = ac.mitigate(model, Planted(fault, dose), layers=layers)
    try:
        yield
    finally:
        handle.remove()
        for tensor, before in changed:
            with torch.no_grad():
                tensor.copy_(before)


def made_models() -> Iterator[tuple[str, str, nn.Module, Sequence[Any]]]:
    """Half, name, model and batches of models with random weights, which are large enough for sharp attention."""
    from transformers import BertConfig, BertModel, GPT2Config, GPT2Model

    torch.manual_seed(0)
    words = [{"input_ids": torch.randint(0, 500, (SAMPLES, TOKENS))}]
    sizes = {"vocab_size": 500, "initializer_range": 0.05}
    gpt2 = GPT2Model(GPT2Config(n_embd=96, n_layer=8, n_head=4, n_positions=TOKENS, **sizes))
    sizes |= {"hidden_size": 96, "intermediate_size": 192}
    bert = BertModel(BertConfig(num_hidden_layers=8, num_attention_heads=4, **sizes))
    vit = ac.models.ViT(image_size=32, patch_size=4, in_chans=3, dim=96, depth=9, heads=4, num_classes=10)
    with torch.no_grad():
        for weight in (p for p in vit.blocks.parameters() if p.ndim > 1):
            weight.mul_(3)  # as it starts, its layers do next to nothing
        for site in [*sites.find(bert), *sites.find(vit)]:
            site.query_weight().mul_(3)
            site.key_weight().mul_(3)
        for block in gpt2.h:
            block.attn.c_attn.weight[:, : 2 * 96].mul_(4)
    yield "choose", "gpt2", gpt2, words
    yield "try", "bert", bert, words
    yield "try", "vit", vit, [torch.randn(SAMPLES, 3, 32, 32)]


def real_models(given: Sequence[str]) -> Iterator[tuple[str, str, nn.Module, Sequence[Any]]]:
    for one in given:
        half, _, rest = one.partition(":")
        name, _, place = rest.partition("=")
        place, _, text = place.partition("@")
        loaded = ac.io.load_model(place)
        if text:
            batches = loaded.text_batches(text, tokens=TOKENS, batch=8, limit=SAMPLES)
        else:
            batches = next(iter(loaded.data.values()))(data_dir=None, batch=32, limit=4 * SAMPLES)
        yield half, name, loaded.model, batches
        said = ac.diagnose(loaded.model, batches, progress=False)
        found = [{"name": f.name, "severity": f.severity, "evidence": f.evidence} for f in said.findings]
        SAID.append({"model": name, "data": batches.description, "headline": said.headline, "findings": found})


def kept_readings(path: Path, model: nn.Module, batches: Sequence[Any]) -> Readings:
    """Readings that were kept here, so that thresholds can be tried without reading anew; else they are made."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        readings = read(model, batches).readings
        np.savez(path, facts=json.dumps(readings.facts), **readings.curves)
    with np.load(path) as found:
        return Readings({n: found[n] for n in found.files if n != "facts"}, json.loads(str(found["facts"])))


def reached(name: str, readings: Readings) -> float:
    """The highest threshold at which the detector would still tell; NaN if it cannot."""
    scores = score(name, readings)
    known = scores[np.isfinite(scores)]
    return float(np.quantile(known, 1 - DETECTORS[name].least)) if len(known) else np.nan


def rows_of(half: str, name: str, model: nn.Module, batches: Sequence[Any], only: str, keep: Path) -> Iterator[Row]:
    """A row for the model as it is, and one for each fault and dose."""

    def row(fault: str, dose: float) -> Row:
        readings = kept_readings(keep / f"{name} {fault} {dose:g}.npz", model, batches)
        found = findings(readings)
        told = {"found": found, "alarms": [f for f in found if f.name != "tokens alike" or f.severity != "note"]}
        names = {what: "; ".join(finding.name for finding in listed) for what, listed in told.items()}
        reads = "images" if readings.facts["images"] else "text"
        row = {"half": half, "model": name, "reads": reads, "fault": fault, "dose": dose} | names
        return row | {f"score: {one}": reached(one, readings) for one in DETECTORS}

    yield (plain := row("", 0.0))
    if sites.record(model) or sum(p.numel() for p in model.parameters()) > LARGE:
        return  # it carries a mitigation, beside which none can be planted, or would take too long on a CPU
    for fault, (_, doses, _, has) in FAULTS.items():
        if name in has.split() or only not in fault or (fault.startswith("patches") and plain["reads"] == "text"):
            continue
        for dose in doses:
            with planted(model, fault, dose):
                yield row(fault, dose)


def separated(rows: Sequence[Row]) -> dict[str, list[float]]:
    """By finding: of the models to choose from, the highest score without, and the lowest at its last dose."""
    chosen, found = [row for row in rows if row["half"] == "choose"], {}
    for fault, (name, doses, _, has) in FAULTS.items():
        free = [row[f"score: {name}"] for row in chosen if not row["fault"] and row["model"] not in has.split()]
        faulty = [row[f"score: {name}"] for row in chosen if (row["fault"], row["dose"]) == (fault, doses[-1])]
        found[f"{name}: {fault}"] = [np.nanmax(free, initial=-np.inf), np.nanmin(faulty, initial=np.inf)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("real", nargs="*", help="HALF:NAME=MODEL, with @TEXT if it reads text")
    parser.add_argument("--only", default="", help="faults with this in their names")
    parser.add_argument("--keep", type=Path, default=Path("planted"), help="where readings are kept and found again")
    parser.add_argument("--out", type=Path, default=EVIDENCE)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: list[Row] = []
    for half, name, model, batches in chain(made_models(), real_models(arguments.real)):
        for row in rows_of(half, name, model, batches, arguments.only, arguments.keep):
            rows.append(row)
            print(*(row[key] for key in ("half", "model", "fault", "dose", "found")), sep=" | ", flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    texts = [{key: f"{x:.4g}" if isinstance(x, float) else x for key, x in row.items()} for row in rows]
    write_rows(arguments.out / "planting.csv", texts, {})
    about = {"command": command("benchmarks/planting.py", sys.argv[1:], without="--out"), "samples": SAMPLES}
    about |= {"thresholds": {name: known.threshold for name, known in DETECTORS.items()}, "seed": 0, "said": SAID}
    about |= {"faults": {name: fault._asdict() for name, fault in FAULTS.items()}, "separated": finite(separated(rows))}
    (arguments.out / "planting.json").write_text(json.dumps({**made("read"), **about}, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
