"""The gradient-parity matrix: its cells, how one is run, and when its gradients count as right."""

import gc
import re
import traceback
import warnings
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product

import torch
import torch.distributed as dist
from parity_formula import with_plain_weights
from parity_subjects import MITIGATIONS, SUBJECTS, Subject, subject_of
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from acutance.errors import AcutanceError

RUNS = ("eager", "compile")
DEPTH = {"eager": 3, "compile": 2}  # compiling is slow
CHECKPOINTING = ("none", "non-reentrant", "re-entrant")
PROCESSES = ("one process", "DDP", "FSDP2")
EXACTLY = "float64"  # of every mitigation
PRECISIONS = ("float32", "bfloat16")  # of all mitigations in one model
# Of a parameter's own gradient, or of a tenth of all where its own is smaller; docs/parity.md says why these.
TOLERANCE = {"float64": 2**-43, "float32": 2**-17, "bfloat16": 2**-4}
FLOOR = 0.1
LOST = r"first layer's values, did not come through this activation checkpointing.*use_reentrant=False"
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
STEPS = (2, 1)  # seeds of the batches; the gradients of the last one are compared
BUCKET = 16 * 2**10  # bytes


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
    """How it went."""

    result: str  # exact, wrong, refused or crashed
    error: float | None = None  # largest relative error of a parameter's gradient
    message: str = ""  # of the refusal, or the crash

    @classmethod
    def of_error(cls, error: Exception) -> "Outcome":
        """Only our own errors are refusals: torch has refused nothing so far."""
        if isinstance(error, AcutanceError):
            return cls("refused", message=str(error))
        return cls("crashed", message="".join(traceback.format_exception(error)))


def cells(library: str) -> list[Cell]:
    """All of a library's."""
    heads, ways = SUBJECTS[library].heads, (RUNS, CHECKPOINTING, PROCESSES)
    exactly = product(heads, MITIGATIONS, *ways, (EXACTLY,))
    return [Cell(*choice) for choice in (*exactly, *product(heads, ("all",), *ways, PRECISIONS))]


def backend(library: str, cell: Cell) -> str:
    """What comes before inductor, or tracing alone: generated code is the business of tests/test_inductor.py."""
    return "aot_eager" if cell.processes == "one process" else "eager"


def refusal(library: str, cell: Cell) -> str | None:
    """What the cell's refusal must say; None where it must be exact."""
    is_lost = library != "acutance.models" and cell.checkpointing == "re-entrant"
    lost = LOST if is_lost and cell.mitigation in ("neutreno", "all") else None
    return SUBJECTS[library].refused.get((cell.heads, cell.mitigation), lost)


def assert_as_pinned(library: str, cell: Cell, outcome: Outcome) -> None:
    """Exact, or refused with the words it should be refused with: no cell may be either."""
    pattern = refusal(library, cell)
    shown = f"{outcome.result}, error {outcome.error}\n{outcome.message}"
    assert outcome.result == ("exact" if pattern is None else "refused"), shown
    assert pattern is None or re.search(pattern, outcome.message), f"not refused for {pattern!r}: {outcome.message}"


@cache
def plain_gradients(
    subject: Subject,
    heads: str,
    precision: str,
    mitigation: str = "all",
    *,
    cut: int | None = None,
    device: str = "cpu",
) -> dict[str, Tensor]:
    """By the plain formula: whole batch, eagerly, in one process, without checkpointing; cut at a layer if asked."""
    model = moved(subject.mitigated(heads, mitigation), precision, device)
    state = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    plain, inputs = with_plain_weights(state, *subject.weights), subject.batch(STEPS[-1], heads)
    with autocast(precision, device):
        output = subject.plain_output(heads, plain, moved(inputs, precision, device), cut)
    loss_of(output).backward()
    return {name: parameter.grad for name, parameter in state.items()}


def wanted_gradients(
    subject: Subject, heads: str, precision: str, mitigation: str = "all", device: str = "cpu"
) -> dict[str, Tensor]:
    """What a cell is compared with: float64 for float32 too, since nothing plain is as exact; else the like."""
    precision = EXACTLY if precision == "float32" else precision
    return plain_gradients(subject, heads, precision, mitigation, device=device)


def run_cell(library: str, cell: Cell, device: str = "cpu") -> Outcome:
    """Train as the cell says and compare the gradients."""
    subject = subject_of(library, DEPTH[cell.run])
    if cell.run == "compile":
        gc.collect()  # models that are gone would still disown what is reset here, which torch may not survive
        torch._dynamo.reset()
        counters.clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = gradients(subject, cell, device)
    except Exception as error:
        return Outcome.of_error(error)
    if cell.run == "compile" and not counters["stats"]["unique_graphs"]:
        return Outcome("crashed", message="nothing was compiled")
    error = distance(found, wanted_gradients(subject, cell.heads, cell.precision, cell.mitigation, device))
    return Outcome("exact" if error < TOLERANCE[cell.precision] else "wrong", error)


def gradients(subject: Subject, cell: Cell, device: str = "cpu") -> dict[str, Tensor]:
    """Of the second of two steps: the first would leave behind what must not be found in the second."""
    model = moved(subject.mitigated(cell.heads, cell.mitigation), cell.precision, device)
    if cell.checkpointing != "none":
        subject.checkpoint(model, cell.checkpointing == "re-entrant")
    wrapped = distribute(subject, model, cell.processes)
    run = torch.compile(wrapped, backend=backend(subject.name, cell)) if cell.run == "compile" else wrapped
    for seed in STEPS:
        wrapped.zero_grad()
        inputs = moved({name: share(x) for name, x in subject.batch(seed, cell.heads).items()}, cell.precision, device)
        with autocast(cell.precision, device):
            output = subject.output(run, inputs)
        loss_of(output).backward()
    return {plain_name(name): whole(parameter.grad) for name, parameter in model.named_parameters()}


def distribute(subject: Subject, model: nn.Module, processes: str) -> nn.Module:
    """Wrap for training in several processes; FSDP2 by blocks, as is usual."""
    if processes == "DDP":
        # Buckets so small that the compiled graph is cut between them, as that of a large model is.
        return DistributedDataParallel(model, bucket_cap_mb=BUCKET / 2**20)
    if processes == "FSDP2":
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (*subject.blocks(model), model):
            fully_shard(part, mesh=mesh)
    return model


def share(x: Tensor) -> Tensor:
    """This process's part of a batch."""
    return x.chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else x


def whole(gradient: Tensor | None) -> Tensor:
    """A sharded gradient put together."""
    assert gradient is not None, "a parameter has no gradient"
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def plain_name(name: str) -> str:
    """A parameter's name without those of wrappers."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


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
    floor = FLOOR * torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    return max(
        float((found[name] - gradient).norm() / torch.maximum(gradient.norm(), floor))
        for name, gradient in expected.items()
    )
