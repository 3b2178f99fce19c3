"""What finished runs are worth: their scores, and how groups of them compare over seeds."""

from acutance.lab.evaluate.compare import compare, compare_robustness, paired
from acutance.lab.evaluate.evaluate import Evaluation, evaluate_run

__all__ = ["Evaluation", "compare", "compare_robustness", "evaluate_run", "paired"]
