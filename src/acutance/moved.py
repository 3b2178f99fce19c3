"""Where the modules of 0.1 are now. Importing an old name raises an error that gives the new one."""

import sys

MOVED = {
    "kernels": "attention.kernels",
    "laboratory": "lab.studies",
    "loading": "io",
    "locks": "files.locks",
    "models.checkpoint": "io",
    "models.from_checkpoint": "load",
    "models.load_checkpoint": "io.load_checkpoint",
    "models.save_checkpoint": "save",
    "operator": "attention.operator",
    "options": "cli.options",
    "processes": "distributed",
    "runs": "lab.evaluate",
    "saving": "io",
    "statistics": "explain.spectral_theory",
    "terminal": "report.tables",
    "wrappers": "sites.structure",
}
ROOMS = {
    "explain": "spectral_theory steer theory",
    "lab": "bench data demo recipes reproduce robustness tasks train",
    "measure": "maps monitor profile reader samples walk",
}
MOVED |= {name: f"{room}.{name}" for room, names in ROOMS.items() for name in names.split()}


def message(name: str) -> str | None:
    """What to say of an old name such as `acutance.walk`; None if it is not one."""
    new = MOVED.get(name.removeprefix("acutance."))
    return None if new is None else f"{name} moved in 0.2: it is acutance.{new} now"


class _Finder:
    """The last finder: it is asked for modules that nobody has found."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name.startswith("acutance.") and (words := message(name)) is not None:
            raise ModuleNotFoundError(words)


sys.meta_path.append(_Finder)
