"""The gradient-parity matrix: its cells, how a cell is run and judged, its evidence and its tests."""

import csv
import gc
import json
import os
import re
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, astuple, dataclass, fields
from functools import cache
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from parity_formula import with_plain_weights
from parity_subjects import MITIGATIONS, SUBJECTS, Subject, subject_of
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from acutance.errors import AcutanceError
from together import in_two_processes

RUNS = ("eager", "compile")
DEPTH = {"eager": 3, "compile": 2}  # compiling is slow
CHECKPOINTING = ("none", "non-reentrant", "re-entrant")
PROCESSES = ("one process", "DDP", "FSDP2")
EXACTLY = "float64"  # of every mitigation
PRECISIONS = ("float32", "bfloat16")  # of all mitigations in one model
# Relative to a parameter's own gradient, or to a tenth of all gradients if that is larger; see docs/parity.md.
TOLERANCE = {"float64": 2**-43, "float32": 2**-17, "bfloat16": 2**-4}
LOST = r"first layer's values, did not come through this activation checkpointing.*use_reentrant=False"
WRAPPERS = r"(_checkpoint_wrapped_module|_orig_mod)\."
STEPS = (2, 1)  # seeds of the batches; the gradients of the last one are compared
BUCKET = 16 * 2**10  # bytes
MARGIN = {EXACTLY: 1e6, "float32": 1e4, "bfloat16": 5}  # by how much the smallest mistake must exceed the tolerance
ALL = "ALL_CELLS"  # an environment variable: run all cells and write the evidence
EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence" / "parity"


@dataclass(frozen=True)
class Cell:
    """One mitigation and one way to train."""

    heads: str
    mitigation: str
    run: str
    checkpointing: str
    processes: str
    precision: str

    def __str__(self) -> str:
        return "-".join(value.replace(" ", "_") for value in asdict(self).values())


@dataclass(frozen=True)
class Outcome:
    """The outcome of a cell."""

    result: str  # exact, wrong, refused or crashed
    error: float | None = None  # largest relative error of a parameter's gradient
    message: str = ""  # of the refusal, or the crash


def cells(library: str) -> list[Cell]:
    """All cells of a library."""
    heads, ways = SUBJECTS[library].heads, (RUNS, CHECKPOINTING, PROCESSES)
    exactly = product(heads, MITIGATIONS, *ways, (EXACTLY,))
    return [Cell(*choice) for choice in (*exactly, *product(heads, ("all",), *ways, PRECISIONS))]


def refusal(library: str, cell: Cell) -> str | None:
    """What the cell's refusal must say; None if it must be exact."""
    is_lost = library != "acutance.models" and cell.checkpointing == "re-entrant"
    lost = LOST if is_lost and cell.mitigation in ("neutreno", "all") else None
    return SUBJECTS[library].refused.get((cell.heads, cell.mitigation), lost)


def assert_as_pinned(library: str, cell: Cell, outcome: Outcome) -> None:
    """Check that the cell is exact if it must be, or refused with the right words."""
    pattern = refusal(library, cell)
    shown = f"{outcome.result}, error {outcome.error}\n{outcome.message}"
    assert outcome.result == ("exact" if pattern is None else "refused"), shown
    assert pattern is None or re.search(pattern, outcome.message), f"not refused for {pattern!r}: {outcome.message}"


@cache
def plain_gradients(subject, heads, precision, mitigation="all", *, cut=None, device="cpu") -> dict[str, Tensor]:
    """Gradients by the plain formula: whole batch, eager, one process, no checkpointing; `cut` at a layer if asked."""
    model = moved(subject.mitigated(heads, mitigation), precision, device)
    state = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    plain, inputs = with_plain_weights(state, *subject.weights), subject.batch(STEPS[-1], heads)
    with autocast(precision, device):
        output = subject.plain_output(heads, plain, moved(inputs, precision, device), cut=cut)
    loss_of(output).backward()
    return {name: parameter.grad for name, parameter in state.items()}


def wanted_gradients(subject, heads, precision, mitigation="all", device="cpu") -> dict[str, Tensor]:
    """The gradients that a cell is compared with: in float64 also for float32, else in the cell's own precision."""
    precision = EXACTLY if precision == "float32" else precision
    return plain_gradients(subject, heads, precision, mitigation, device=device)


def run_cell(library: str, cell: Cell, device: str = "cpu") -> Outcome:
    """Train as the cell says and compare the gradients."""
    subject = subject_of(library, DEPTH[cell.run])
    if cell.run == "compile":
        gc.collect()  # otherwise models freed later would touch what is reset here, which may crash torch
        torch._dynamo.reset()
        counters.clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = gradients(subject, cell, device)
    except AcutanceError as error:  # only our errors are refusals; torch has refused nothing so far
        return Outcome("refused", message=str(error))
    except Exception as error:
        return Outcome("crashed", message="".join(traceback.format_exception(error)))
    if cell.run == "compile" and not counters["stats"]["unique_graphs"]:
        return Outcome("crashed", message="nothing was compiled")
    error = distance(found, wanted_gradients(subject, cell.heads, cell.precision, cell.mitigation, device))
    return Outcome("exact" if error < TOLERANCE[cell.precision] else "wrong", error)


def gradients(subject: Subject, cell: Cell, device: str = "cpu") -> dict[str, Tensor]:
    """Gradients of the second of two steps, so that anything the first leaves behind would show."""
    model = moved(subject.mitigated(cell.heads, cell.mitigation), cell.precision, device)
    if cell.checkpointing != "none":
        subject.checkpoint(model, cell.checkpointing == "re-entrant")
    wrapped = distribute(subject, model, cell.processes)
    # The stages before inductor, or only tracing; tests/test_inductor.py tests generated code.
    backend = "aot_eager" if cell.processes == "one process" else "eager"
    run = torch.compile(wrapped, backend=backend) if cell.run == "compile" else wrapped
    for seed in STEPS:
        wrapped.zero_grad()
        inputs = moved({name: share(x) for name, x in subject.batch(seed, cell.heads).items()}, cell.precision, device)
        with autocast(cell.precision, device):
            output = subject.output(run, inputs)
        loss_of(output).backward()
    return gradients_by_name(model)


def distribute(subject: Subject, model: nn.Module, processes: str) -> nn.Module:
    """Wrap for training in several processes; FSDP2 by blocks, as is usual."""
    if processes == "DDP":
        # Buckets so small that the compiled graph is cut between them, as in a large model.
        return DistributedDataParallel(model, bucket_cap_mb=BUCKET / 2**20)
    if processes == "FSDP2":
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (*subject.blocks(model), model):
            fully_shard(part, mesh=mesh)
    return model


def share(x: Tensor) -> Tensor:
    """This process's part of a batch."""
    return x.chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else x


def gradients_by_name(model: nn.Module) -> dict[str, Tensor]:
    """Gradients by the parameters' names without wrappers, unsharded."""
    found = {re.sub(WRAPPERS, "", name): parameter.grad for name, parameter in model.named_parameters()}
    return {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in found.items()}


def moved(x, precision: str, device: str):
    """A module, a tensor or a dictionary of them; autocast starts from float32."""
    if isinstance(x, dict):
        return {name: moved(value, precision, device) for name, value in x.items()}
    if isinstance(x, Tensor) and not x.is_floating_point():
        return x.to(device)
    return x.to(device, torch.float64 if precision == "float64" else torch.float32)


def autocast(precision: str, device: str):
    return torch.autocast(device, torch.bfloat16) if precision == "bfloat16" else nullcontext()


def loss_of(output: Tensor) -> Tensor:
    return (output if output.dtype == torch.float64 else output.float()).square().mean()


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative error among the parameters."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    floor = 0.1 * torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    errors = [(found[name] - wanted).norm() / torch.maximum(wanted.norm(), floor) for name, wanted in expected.items()]
    return float(max(errors))


FOUND: dict[tuple[str, Cell], Outcome] = {}


def outcome(library: str, cell: Cell) -> Outcome:
    """A cell's outcome, computed on first use. Cells that need two processes share them, since starting is slow."""
    if (library, cell) not in FOUND and cell.processes == "one process":
        FOUND[library, cell] = run_cell(library, cell)
    elif (library, cell) not in FOUND:
        FOUND.update(_in_two_processes(library))
    return FOUND[library, cell]


def write_evidence(library: str) -> None:
    """Write every cell of the library, and the smallest mistake that these models would show."""
    with (EVIDENCE / f"{library}.csv").open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow([*(field.name for field in fields(Cell)), "result", "error"])
        for cell in cells(library):
            got = outcome(library, cell)
            rows.writerow([*astuple(cell), got.result, "" if got.error is None else f"{got.error:.1e}"])
    file = EVIDENCE / "libraries.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    known[library] = {
        "torch": torch.__version__.partition("+")[0],
        "tolerance": TOLERANCE,
        "smallest cut": {precision: float(f"{smallest_cut(library, precision):.1e}") for precision in MARGIN},
        "plain rounding": {each: float(f"{plain_rounding(library, each):.1e}") for each in PRECISIONS},
    }
    file.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


def tested(library: str) -> list[Cell]:
    """All eager cells of one process, and enough of the others, which are slow, that every pair of settings occurs."""
    if ALL in os.environ:
        return cells(library)
    return [cell for cell in cells(library) if is_quick(cell) or (library, cell) in every_pair()]


@cache
def every_pair() -> list[tuple[str, Cell]]:
    """Slow cells of all libraries together, in which every pair of settings (the library is one) occurs."""
    slow = [(library, cell) for library in SUBJECTS for cell in cells(library) if not is_quick(cell)]
    pairs = {each: set(combinations(enumerate((each[0], *astuple(each[1]))), 2)) for each in slow}
    chosen, wanted = [], set().union(*pairs.values())
    while wanted:
        best = max(pairs, key=lambda each: len(pairs[each] & wanted))
        chosen.append(best)
        wanted -= pairs[best]
    return chosen


def is_quick(cell: Cell) -> bool:
    return (cell.run, cell.processes) == ("eager", "one process")


def _in_two_processes(library: str) -> dict[tuple[str, Cell], Outcome]:
    chosen = [cell for cell in tested(library) if cell.processes != "one process"]
    with tempfile.TemporaryDirectory() as folder:
        in_two_processes(_worker, library, chosen, folder)
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2)]
    outcomes = {}
    for cell, *both in zip(chosen, *found, strict=True):
        first, second = (Outcome(**outcome) for outcome in both)
        assert first.result == second.result, f"{cell}: {first} in one process, {second} in the other"
        outcomes[library, cell] = max(first, second, key=lambda outcome: outcome.error or 0.0)
    return outcomes


def _worker(rank: int, library: str, chosen: list[Cell], folder: str) -> None:
    dist._DEFAULT_FIRST_BUCKET_BYTES = BUCKET
    Path(folder, f"{rank}.json").write_text(json.dumps([asdict(run_cell(library, cell)) for cell in chosen]))


def _models(library: str) -> Iterator[tuple[Subject, str]]:
    for run, heads in product(RUNS, SUBJECTS[library].heads):
        yield subject_of(library, DEPTH[run]), heads


def smallest_cut(library: str, precision: str) -> float:
    """The error of the smallest mistake: a gradient through v⁰ that is missing in a single layer."""
    return min(
        distance(plain_gradients(*model, precision, cut=layer), wanted_gradients(*model, precision))
        for model in _models(library)
        for layer in range(2, model[0].depth + 1)
    )


def plain_rounding(library: str, precision: str) -> float:
    """The plain formula's own distance from float64: the rounding error of right gradients."""
    return max(
        distance(plain_gradients(*model, precision), plain_gradients(*model, EXACTLY)) for model in _models(library)
    )


class MatrixChecks:
    """Inherited by a test class that names its libraries."""

    libraries: tuple[str, ...]

    def pytest_generate_tests(self, metafunc):
        if "cell" in metafunc.fixturenames:
            chosen = [(library, cell) for library in self.libraries for cell in tested(library)]
            marks = {each: () if is_quick(each[1]) else pytest.mark.slow for each in chosen}
            cells = [pytest.param(*each, marks=marks[each], id=f"{each[0]}-{each[1]}") for each in chosen]
            metafunc.parametrize(("library", "cell"), cells)
        else:
            metafunc.parametrize("library", self.libraries)

    def test_gradients_equal_the_plain_formula_or_are_refused_as_pinned(self, library, cell):
        assert_as_pinned(library, cell, outcome(library, cell))

    @pytest.mark.slow
    def test_the_evidence_is_what_was_found(self, library):
        if ALL in os.environ:
            write_evidence(library)
        with (EVIDENCE / f"{library}.csv").open(newline="") as file:
            kept = {Cell(*row[:6]): row[6] for row in list(csv.reader(file))[1:]}
        assert {cell: outcome(library, cell).result for cell in tested(library)}.items() <= kept.items()

    @pytest.mark.parametrize("precision", MARGIN)
    def test_a_gradient_cut_at_one_layer_would_be_seen(self, library, precision):
        assert smallest_cut(library, precision) > MARGIN[precision] * TOLERANCE[precision]

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_the_tolerance_is_no_wider_than_rounding_asks_for(self, library, precision):
        assert TOLERANCE[precision] / 256 < plain_rounding(library, precision) < TOLERANCE[precision]
