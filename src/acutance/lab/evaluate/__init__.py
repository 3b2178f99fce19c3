"""What finished runs are worth: their scores, and how groups of them compare over seeds."""

from acutance.lab.evaluate.compare import Comparison, Group, Paired, compare, paired
from acutance.lab.evaluate.evaluate import Evaluation, evaluate_run
from acutance.lab.evaluate.robust import RobustnessComparison, compare_robustness

__all__ = [
    "Comparison", "Evaluation", "Group", "Paired", "RobustnessComparison", "compare", "compare_robustness",
    "evaluate_run", "paired",
]  # fmt: skip
