"""Where the modules of 0.1 are now. Importing an old name raises an error that gives the new one."""

import sys

_NOW = {  # with the old names; a room with a dot behind it has kept them
    "attention.": "kernels operator",
    "cli.": "options",
    "distributed": "processes",
    "explain.": "spectral_theory steer theory",
    "explain.spectral_theory": "statistics",
    "io": "loading models.checkpoint saving",
    "io.load_checkpoint": "models.load_checkpoint",
    "lab.": "bench data demo locks recipes reproduce robustness tasks train",
    "lab.evaluate": "runs",
    "lab.studies": "laboratory",
    "load": "models.from_checkpoint",
    "measure.": "maps monitor profile reader samples walk",
    "mitigations.base": "mitigations.spec",
    "report.tables": "terminal",
    "save": "models.save_checkpoint",
    "sites.structure": "wrappers",
}
MOVED = {old: new + old if new.endswith(".") else new for new, names in _NOW.items() for old in names.split()}


def message(name: str) -> str | None:
    """What to say of an old name such as `acutance.walk`; None if it is not one."""
    new = MOVED.get(name.removeprefix("acutance."))
    return None if new is None else f"{name} moved in 0.2: it is acutance.{new} now"


def find_spec(name: str, path: object = None, target: object = None) -> None:
    """This module is the last finder: it is asked for modules that nobody has found."""
    if name.startswith("acutance.") and (words := message(name)) is not None:
        raise ModuleNotFoundError(words)


sys.meta_path.append(sys.modules[__name__])
