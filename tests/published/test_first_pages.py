"""What README and docs/index.md publish of speed and memory is what the files hold."""

import statistics
from collections.abc import Callable, Iterator

import pytest

from published import (
    DEIT,
    LLAMA,
    RESULTS,
    STEPS,
    TOKENS,
    assert_said,
    assert_table,
    line,
    measured,
    one,
    read,
    rounded,
    rows_of,
    step,
    trained,
    with_quartiles,
)


def operator_memory_table() -> Iterator[str]:
    rows = read(RESULTS / "operator_memory-cuda-bfloat16-torch2.11.0.csv")
    names = {"logsumexp": "A.logsumexp()", "eigenvalues(k=4)": "A.eigenvalues(k=4)", "stationary": "A.stationary()"}
    for operation in ("A @ x", "A.T @ y", *names):
        cells = []
        for row in (one(rows, tokens=tokens, op=operation) for tokens in ("2048", "8192", "32768")):
            share = 100 * float(row["peak_to_matrix"])
            cells.append(f"{rounded(row['peak_mib'], 0)} ({rounded(share, 1 if share < 10 else 0)} %)")
        yield line(f"`{names.get(operation, operation)}`", *cells)


def said_in_the_index() -> Iterator[str]:
    """All but the first run of each, which compiled."""
    seconds = [taken for label in ("plain", "neutreno") for taken in trained("cifar100", label)[0][:2]]
    yield f"in about {5 * round(statistics.mean(seconds) / 5)} s a run on one H200"


def said_in_the_readme() -> Iterator[str]:
    for part in STEPS:
        yield f"takes {with_quartiles(step(part, 'training', 'NeuTRENO'))}"
    memory = rounded(step("steps-32", "training", "NeuTRENO", "default")["memory_ratio"], 2)
    inference = [with_quartiles(step(part, "inference", "NeuTRENO")) for part in STEPS]
    yield f"with {memory} of its peak memory, and inference {inference[0]}"
    yield f"and {inference[1]}. Without CUDA graphs"
    plain, ours = (
        [step("steps-32", table, name) for table in ("training", "inference")] for name in ("plain ViT", "NeuTRENO")
    )
    yield "Our own plain ViT takes {} and {}, so the term".format(*(rounded(row["ratio"], 3) for row in plain))
    added = {rounded(100 * (float(a["ms"]) / float(b["ms"]) - 1), 0) for a, b in zip(ours, plain, strict=True)}
    assert added <= {"1", "2"}
    plain, ours = (one(rows_of("bench-end-to-end-1024"), variant=v, mode="recorded") for v in ("plain ViT", "NeuTRENO"))
    speeds = (rounded(row["images_per_s"], 0) for row in (ours, plain))
    yield "trains on {} images/s with NeuTRENO and on {} without at batches of 1024".format(*speeds)
    adds = (rounded(100 * (float(measured(model, TOKENS)["ratio"]) - 1), 0) for model in (LLAMA, DEIT))
    yield "adds {} % to a Llama's forward pass and {} % to that of timm's DeiT-Ti".format(*adds)


def said_of_trainings_in_the_readme() -> Iterator[str]:
    for evidence, told in (("cifar100", "took"), ("cifar100-batch1024", "it took")):
        (steered, _), (plain, _) = trained(evidence, "neutreno"), trained(evidence, "plain")
        yield f"{told} {steered[0]} to {steered[-1]} s to"
        yield f"with NeuTRENO, and {plain[0]} to {plain[-1]} s to"
    (_, steered), (_, plain) = trained("cifar100", "neutreno"), trained("cifar100", "plain")
    yield f"At the recipe's own batches of 512 it is {steered:,} and {plain:,} images/s"
    seconds = [trained("cifar100", label)[0] for label in ("plain", "neutreno")]
    yield f"{seconds[0][1]} s a run on one H200 and with NeuTRENO {seconds[1][0]} to {seconds[1][1]} s, once compiled"


def test_the_table_of_memory_is_its_file() -> None:
    assert_table("README.md", "What it does", 1, operator_memory_table())


@pytest.mark.parametrize(
    ("page", "told"),
    [
        ("docs/index.md", said_in_the_index),
        ("README.md", said_in_the_readme),
        ("README.md", said_of_trainings_in_the_readme),
    ],
)
def test_what_the_first_pages_say(page: str, told: Callable[[], Iterator[str]]) -> None:
    assert_said(page, told())
