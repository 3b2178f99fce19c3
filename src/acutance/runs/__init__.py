"""What finished runs are worth: their scores, and how groups of them compare over seeds."""

from acutance.runs.compare import Comparison, Group, compare
from acutance.runs.evaluate import Evaluation, evaluate_run
from acutance.runs.paired import Paired, paired
from acutance.runs.robust import RobustnessComparison, compare_robustness

__all__ = [
    "Comparison", "Evaluation", "Group", "Paired", "RobustnessComparison", "compare", "compare_robustness",
    "evaluate_run", "paired",
]  # fmt: skip
