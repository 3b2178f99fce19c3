"""How accurate a classifier stays on corrupted and adversarial images."""

from acutance.lab.robustness.attacks import FGSM, PGD, as_attack
from acutance.lab.robustness.corruptions import CORRUPTIONS, SEVERITIES, corrupt, draw_once
from acutance.lab.robustness.evaluate import RobustnessTable, evaluate, images_of, table_name

__all__ = [
    "CORRUPTIONS", "FGSM", "PGD", "SEVERITIES", "RobustnessTable", "as_attack", "corrupt", "draw_once", "evaluate",
    "images_of", "table_name",
]  # fmt: skip
