"""The cells of one process on a GPU, under each of the kernels that CUDA has for attention."""

from importlib.util import find_spec
from itertools import product

import parity_matrix as parity
import pytest
import torch
from parity_matrix import CHECKPOINTING, DEPTH, RUNS, STEPS, Cell, autocast, moved
from parity_subjects import SUBJECTS, subject_of
from torch.nn.attention import SDPBackend, sdpa_kernel

DEVICE = "cuda"
# Flash attention is for half precision alone, and the efficient kernel knows no float64.
KERNELS = [
    (SDPBackend.MATH, "float64"),
    (SDPBackend.EFFICIENT_ATTENTION, "float32"),
    (SDPBackend.EFFICIENT_ATTENTION, "bfloat16"),
    (SDPBackend.FLASH_ATTENTION, "bfloat16"),
]
INSTALLED = [name for name in SUBJECTS if name in ("acutance.models", "torch.nn") or find_spec(name) is not None]
WAYS = [
    (library, kernel, Cell(heads, "all", run, checkpointing, "one process", precision))
    for library in INSTALLED
    for (kernel, precision), run, checkpointing, heads in product(KERNELS, RUNS, CHECKPOINTING, SUBJECTS[library].heads)
]

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def whole_float32_and_no_padding(monkeypatch):
    """Convolutions would round to TensorFloat-32 by default; flash attention takes no mask."""
    monkeypatch.setattr(SUBJECTS["transformers"], "padded", False)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@pytest.fixture(autouse=True, scope="module")
def own_plain_gradients():
    """Those kept are of padded batches outside of this module, and of others inside."""
    parity.plain_gradients.cache_clear()
    yield
    parity.plain_gradients.cache_clear()


def library_has(library, kernel, cell):
    """Whether the library's own model, unmitigated, can be run by this kernel at all: grouped heads often cannot."""
    subject = subject_of(library, DEPTH[cell.run])
    model = moved(subject.library_model(cell.heads), cell.precision, DEVICE)
    run = torch.compile(model, backend="eager") if cell.run == "compile" else model
    try:
        with sdpa_kernel([kernel]), autocast(cell.precision, DEVICE):
            subject.output(run, moved(subject.batch(STEPS[0], cell.heads), cell.precision, DEVICE))
    except RuntimeError as error:
        return "No available kernel" not in str(error)
    return True


@pytest.mark.parametrize(("library", "kernel", "cell"), WAYS, ids=lambda part: getattr(part, "name", str(part)))
def test_gradients_equal_the_plain_formula_under_each_kernel(library, kernel, cell):
    if not subject_of(library, DEPTH[cell.run]).has(cell.heads):
        pytest.skip(f"this version of {library} has no {cell.heads} heads")
    if not library_has(library, kernel, cell):
        pytest.skip(f"{library} itself has no {kernel.name} for {cell.heads} heads in {cell.precision} here")
    with sdpa_kernel([kernel]):  # around the backward pass too: checkpointing attends again in it
        outcome = parity.run_cell(library, cell, DEVICE)
    parity.assert_as_pinned(library, cell, outcome)
