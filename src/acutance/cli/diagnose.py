"""`acutance diagnose`."""

import shlex
from dataclasses import fields
from typing import Annotated

import acutance as ac
from acutance.cli.options import HTML, JSON, DataOptions, Model, Part, console, option, spread, write


@spread
def diagnose(
    model: Model,
    options: DataOptions,
    data: Annotated[str | None, option("Read the digits, or a run's own test data.")] = None,
    part: Part = None,
    prune: Annotated[int, option("Also leave out so many layers, and measure what that costs.", min=0)] = 0,
    quality: Annotated[str | None, option("What to measure: accuracy, perplexity …, or a module:function.")] = None,
    json_path: JSON = None,
    html_path: HTML = None,
) -> None:
    """Say in one screen whether a model over-smooths, where and why, what else is wrong, and what to try.

    Examples: acutance diagnose hf:gpt2 --text wiki.test.txt --limit 16

    acutance diagnose acutance-demo/plain-seed0 --html diagnosis.html
    """
    loaded = options.load(model, head=True)
    batches = options.batches(loaded, data)
    named = {"part": part} | {field.name: getattr(options, field.name) for field in fields(options)}
    usual = {"device": "auto"}
    given = {name: value for name, value in named.items() if value not in (None, usual.get(name))}
    command = " ".join(f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in given.items())
    about = {"name": loaded.name, "data": batches.description, "options": command}
    found = ac.diagnose(loaded.model, batches, part=part, remove=prune, quality=quality, context=about)
    console.print(found)
    write(json_path, found.save)
    write(html_path, found.to_html)
