"""The scores of finished runs, and comparisons of groups of runs over seeds."""

from acutance.lab.evaluate.compare import compare, compare_robustness
from acutance.lab.evaluate.evaluate import Evaluation, evaluate_run
from acutance.lab.evaluate.statistics import paired

__all__ = ["Evaluation", "compare", "compare_robustness", "evaluate_run", "paired"]
