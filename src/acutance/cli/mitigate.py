"""`acutance mitigate`."""

from pathlib import Path
from typing import Annotated

import typer

from acutance.cli.measure import MeasureOptions
from acutance.cli.options import Model, console, ints, option, say, spread


@spread
def mitigate(
    model: Model,
    spec: Annotated[str, typer.Argument(help="The mitigation, e.g. neutreno:0.6 or neutreno:0.4+featscale.")],
    options: MeasureOptions,
    layers: Annotated[str | None, option("Comma-separated numbers, 1 the first; all by default.")] = None,
    out: Annotated[Path | None, option("Save the mitigated model in this folder.")] = None,
) -> None:
    """Put a mitigation into a model, print its smoothness before and after, and save it, ready for fine-tuning.

    Example: acutance mitigate hf:gpt2 neutreno:0.4 --text wiki.test.txt --limit 64 --out gpt2-neutreno
    """
    import torch

    import acutance as ac
    from acutance.mitigations import as_mitigation

    torch.manual_seed(0)  # the same command writes the same file
    chosen = None if layers is None else ints(layers, "--layers")
    mitigation = as_mitigation(spec)
    loaded = options.load(model, head=True)
    batches = options.batches(loaded)
    before = options.profile(loaded, batches)
    ac.mitigate(loaded.model, mitigation, layers=chosen, part=options.part)
    console.print(before.compare(options.profile(loaded, batches)))
    if out is not None:
        is_folder = loaded.save_inputs is not None  # a model of transformers
        say(f"wrote {ac.save(loaded.model, out if is_folder else out / 'model.safetensors')}")
        if loaded.save_inputs is not None:
            loaded.save_inputs(out, options.text is not None)
