"""diagnose: is the model over-smoothing, where, why, does it matter, and what should one try?

`readings` collects the numbers in one pass, `findings` says what is wrong with them, and a `Diagnosis` prints it.
`quality` says how well a model does its work, `compare` how two of them differ.
Formulas of metrics, and what a single library needs, belong in their own rooms.
"""

from acutance.diagnose.diagnosis import Diagnosis, diagnose
from acutance.diagnose.findings import Finding

__all__ = ["Diagnosis", "Finding", "diagnose"]
