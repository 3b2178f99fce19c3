"""λ̃ over orders of magnitude, constant and learnt: what is too little, what is too much."""

from __future__ import annotations

from acutance.lab.reproduce.neutreno import PAPER
from acutance.lab.reproduce.target import Row, Target
from acutance.lab.reproduce.trainings import LEARNT, STRENGTHS

COLUMNS = {"top-1": "test/top1", "loss": "test/loss", "token cosine, last layer": "test/token_cosine@block"}
NOTES = (
    "The text we read says which λ̃ was used, without an ablation to compare with. Too little shows where top-1 and "
    "cosine are those of λ̃ = 0; too much where top-1 falls below it and the loss rises, or where the loss stops being "
    "a number: such a run is reported as diverged, and the others go on."
)


def _ablation(name: str, recipe: str, data: str, cost: str) -> Target:
    constant = (Row(f"λ̃ = {strength:g}", f"{recipe}-neutreno-{strength:g}") for strength in STRENGTHS)
    learnt = (Row(f"learnt per {learn}", f"{recipe}-neutreno-{learn}") for learn in LEARNT)
    rows = (Row("λ̃ = 0", recipe), *constant, *learnt)
    title = f"Ablation of λ̃ over orders of magnitude, constant and learnt, on {data}"
    return Target(name, title, PAPER, "ablation", rows, COLUMNS, data, cost, NOTES)


RUNS = f"for each seed {len(STRENGTHS) + len(LEARNT) + 1} runs"
TARGETS = (
    _ablation("neutreno-lambda", "cifar100", "CIFAR-100", f"a GPU; {RUNS} of 5 million images of 32×32"),
    _ablation("neutreno-lambda-digits", "digits", "the embedded digits", f"a CPU core; {RUNS} of half a minute"),
)
