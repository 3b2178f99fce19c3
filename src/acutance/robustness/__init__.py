"""How a classifier of images stands corruptions and attacks."""

from acutance.robustness.attacks import FGSM, PGD, as_attack
from acutance.robustness.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from acutance.robustness.evaluate import evaluate
from acutance.robustness.table import RobustnessTable, table_name

__all__ = [
    "CORRUPTIONS", "FGSM", "PGD", "SEVERITIES", "RobustnessTable", "as_attack", "corrupt", "evaluate", "table_name",
]  # fmt: skip
