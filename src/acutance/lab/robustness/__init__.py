"""How a classifier of images stands corruptions and attacks."""

from acutance.lab.robustness.attacks import FGSM, PGD, as_attack
from acutance.lab.robustness.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from acutance.lab.robustness.evaluate import evaluate
from acutance.lab.robustness.table import RobustnessTable, table_name

__all__ = [
    "CORRUPTIONS", "FGSM", "PGD", "SEVERITIES", "RobustnessTable", "as_attack", "corrupt", "evaluate", "table_name",
]  # fmt: skip
