"""`acutance sweep` and `acutance mitigate`: remedies in pretrained models, with quality beside smoothness."""

from pathlib import Path
from typing import Annotated, Any

import typer

import acutance as ac
from acutance.cli.options import JSON, DataOptions, Model, Part, console, ints, option, say, spread, words, write
from acutance.cli.verbs import MeasureOptions
from acutance.errors import AcutanceError
from acutance.lab.commands import stoppable

Quality = Annotated[str | None, option("accuracy, perplexity, loss …, or a module:function; by default what fits.")]
Steps = Annotated[int, option("Steps of fine-tuning on the first half of the data; the rest evaluates.", min=0)]
TrainedPart = Annotated[str, option("What is fine-tuned: all weights, or only the remedy's parameters.")]
Rate = Annotated[float, option("Peak learning rate of the fine-tune; ten times as much for the remedy.")]


@spread
def sweep(
    model: Model,
    options: DataOptions,
    remedies: Annotated[str, option("Comma-separated names or specs, or all.")] = "all",
    strengths: Annotated[str | None, option("Comma-separated, for remedies with a strength.")] = None,
    fine_tune: Steps = 0,
    train: TrainedPart = "all",
    lr: Rate = 1e-4,
    quality: Quality = None,
    data: Annotated[str | None, option("digits, or own: a run's test data.")] = None,
    part: Part = None,
    json_path: JSON = None,
) -> None:
    """Try remedies in a pretrained model: which of them change its quality, and its smoothness, and at what cost?

    Each is put into a copy of the model and measured, before and after an optional short fine-tune that is the same for
    all. Plain fine-tuning is a row too. With --json the table is written after each remedy, and the same command
    resumes a sweep that was stopped.

    Examples: acutance sweep acutance-demo/plain-seed0 --remedies all --fine-tune 50 --json sweep.json

    acutance sweep hf:gpt2 --text wiki.test.txt --limit 64 --remedies neutreno,featscale --strengths 0.1,0.4
    """
    from acutance.lab.sweep.run import specs_of

    given = _floats(strengths)
    specs_of(remedies, given)  # before anything is read
    loaded = options.load(model, head=True)
    batches = options.batches(loaded, data)
    context = {"name": loaded.name, "data": batches.description}
    how: dict[str, Any] = {"fine_tune": fine_tune, "train": train, "lr": lr, "quality": quality, "part": part}
    advice = "Finished remedies are kept; the same command resumes." if json_path else "Nothing is kept without --json."
    with stoppable(advice):
        found = ac.sweep(loaded.model, batches, remedies, strengths=given, path=json_path, context=context, **how)
    console.print(found.table())
    say(found.verdict())
    write(json_path, found.save)


def _floats(text: str | None) -> list[float]:
    try:
        return [float(number) for number in words(text)] if text else []
    except ValueError as error:
        raise AcutanceError(f"--strengths takes numbers with commas between, such as 0.1,0.4, not {text!r}") from error


@spread
def mitigate(
    model: Model,
    spec: Annotated[str, typer.Argument(help="The mitigation, e.g. neutreno:0.4,learn=head or featscale.")],
    options: MeasureOptions,
    layers: Annotated[str | None, option("Comma-separated numbers, 1 the first; all by default.")] = None,
    fine_tune: Steps = 0,
    train: TrainedPart = "all",
    lr: Rate = 1e-4,
    quality: Quality = None,
    out: Annotated[Path | None, option("Save the mitigated model in this folder.")] = None,
) -> None:
    """Put a mitigation into a model, print its quality and smoothness before and after, and save it.

    In a pretrained model start at the identity (learn=head) and fine-tune. A constant strength harms trained weights.

    Example: acutance mitigate hf:gpt2 neutreno:0.4,learn=head --fine-tune 100 --text wiki.txt --out gpt2-neutreno
    """
    from acutance.diagnose.quality import NOT_MEASURED
    from acutance.io.loading import refuse_unsavable
    from acutance.lab.sweep.fine_tune import FineTune
    from acutance.lab.sweep.fine_tune import fine_tune as train_briefly
    from acutance.lab.sweep.run import from_identity
    from acutance.mitigations import as_mitigation
    from acutance.mitigations.base import parts_of

    chosen, mitigation = None if layers is None else ints(layers, "--layers"), as_mitigation(spec)
    how: Any = FineTune(fine_tune, train, lr)  # type: ignore[arg-type] # it refuses others
    if out is not None:
        refuse_unsavable(model, out)
    loaded = options.load(model, head=True)
    batches = options.batches(loaded)
    trained, held, objective, lowered = how.prepare(loaded.model, batches, quality)
    before, profile = objective.measure(loaded.model, held) if objective else [], options.profile(loaded, held)
    handle = ac.mitigate(loaded.model, mitigation, layers=chosen, part=options.part)
    if lowered is not None:
        train_briefly(loaded.model, trained, lowered, how, handle, "fine-tuning")
        say(f"fine-tuned for {fine_tune} steps on {trained.description}; evaluated on {held.description}")
    after = objective.measure(loaded.model, held) if objective else []
    headline = before[0].change(after[0]).verdict if before else NOT_MEASURED
    if headline == "worse":
        ways = ["fine-tune for longer" if fine_tune else "fine-tune"]
        ways += [f"start with {gentle}" for one in parts_of(mitigation) if (gentle := from_identity(one))]
        headline += f": {', or '.join(ways)}"
    say("\n".join([headline, *(f"  {one.to(other)}" for one, other in zip(before, after, strict=True))]))
    console.print(profile.compare(options.profile(loaded, held)))
    if out is not None:
        is_folder = loaded.save_inputs is not None  # a model of transformers
        say(f"wrote {ac.save(loaded.model, out if is_folder else out / 'model.safetensors')}")
        if is_folder:
            loaded.save_inputs(out, options.text is not None)
