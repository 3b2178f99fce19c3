"""The scores of finished runs, and comparisons of groups of runs over seeds."""

from acutance.lab.evaluate.compare import compare, compare_robustness, paired
from acutance.lab.evaluate.evaluate import Evaluation, evaluate_run

__all__ = ["Evaluation", "compare", "compare_robustness", "evaluate_run", "paired"]
