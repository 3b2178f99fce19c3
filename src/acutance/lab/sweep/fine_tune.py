"""A short fine-tune of a mitigated model: the same batches in the same order for every remedy."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from acutance.diagnose.quality import NOT_MEASURED, Objective, objective_of
from acutance.errors import AcutanceError, NonFiniteError
from acutance.lab.data.seeds import epoch_order
from acutance.measure.walk import track
from acutance.sites.mitigate import Handle

Trained = Literal["all", "remedy"]
Prepared = tuple[Sequence[Any], Sequence[Any], Objective | None, Objective | None]
FASTER = 10  # times the rate of the other weights: what starts at the identity has a way to go in few steps
WARM = 0.1  # share of the steps in which the learning rate rises; afterwards it falls to 0
CLIP = 1.0  # norm of the gradients
MASKS = 1 << 20  # seeds of masked tokens, far from those of the evaluation


@dataclass(frozen=True)
class FineTune:
    """How a model is fine-tuned; everything random depends on the seed alone."""

    steps: int = 0
    train: Trained = "all"  # weights, or only the remedy's parameters
    lr: float = 1e-4  # of AdamW, without weight decay
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 0 or self.lr <= 0:
            raise AcutanceError(f"fine-tune {self.steps} steps at {self.lr}: take 0 or more steps and a positive rate")
        if self.train not in get_args(Trained):
            raise AcutanceError(f"train {self.train!r} is not one of {', '.join(get_args(Trained))}")

    def prepare(self, model: nn.Module, batches: Sequence[Any], quality: Any = None) -> Prepared:
        """The batches to train on, which are the first half, those to evaluate on, and an objective for evaluation
        and one for training. Without steps all batches evaluate. What cannot be trained is refused.
        """
        half = len(batches) // 2 if self.steps else 0
        if self.steps and not half:
            raise AcutanceError(
                f"{len(batches)} batch cannot be split into training and evaluation: take a smaller --batch"
            )
        objective = objective_of(model, batches[half:], quality)
        lowered = objective_of(model, batches[:half]) if self.steps else None
        if self.steps and lowered is None:
            raise AcutanceError(f"there is nothing to fine-tune for: {NOT_MEASURED}")
        halves = {parameter.dtype for parameter in model.parameters()} & {torch.float16, torch.bfloat16}
        if self.steps and halves:
            name = str(halves.pop()).removeprefix("torch.")
            raise AcutanceError(f"small steps are lost in {name} weights: load with dtype float32 to fine-tune")
        return batches[:half], batches[half:], objective, lowered


def fine_tune(
    model: nn.Module,
    batches: Sequence[Any],
    objective: Objective,
    how: FineTune,
    handle: Handle | None = None,
    progress: str | None = None,
) -> None:
    """Lower the objective's loss, in place; on a GPU in bfloat16 with float32 weights."""
    groups = handle.parameter_groups(FASTER * how.lr) if handle is not None else []
    own = {id(parameter) for group in groups for parameter in group["params"]}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in own]
    if how.train == "all" and rest:
        groups.append({"params": rest, "lr": how.lr})
    if not groups:
        return
    optimiser = torch.optim.AdamW(groups, weight_decay=0.0)
    rates, device = [group["lr"] for group in groups], next(model.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []), ExitStack() as stack:
        torch.manual_seed(how.seed)  # of dropout
        if how.train == "remedy":
            for parameter in rest:
                parameter.requires_grad_(False)
                stack.callback(parameter.requires_grad_, True)
        for module in model.modules():  # some may be frozen
            stack.callback(setattr, module, "training", module.training)
        model.train()
        for step in track(range(how.steps), progress, stack):
            epoch, place = divmod(step, len(batches))
            batch = batches[int(epoch_order(len(batches), how.seed, epoch)[place])]
            with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
                score = objective.score(model, batch, MASKS + step)
            weights = score.weights.to(score.loss)
            loss = (score.loss * weights).sum() / weights.sum()
            if not bool(loss.isfinite()):
                raise NonFiniteError(
                    f"the loss is not finite in step {step + 1} of fine-tuning: lower the rate {how.lr}"
                )
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], CLIP)
            for group, rate in zip(optimiser.param_groups, rates, strict=True):
                group["lr"] = rate * min((step + 1) / (WARM * how.steps), 1 - step / how.steps)
            optimiser.step()
        optimiser.zero_grad()
