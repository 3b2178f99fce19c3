"""Every table and figure of the two papers behind one command: the runs it needs, what is read, what was published."""

from acutance.lab.reproduce.catalogue import TARGETS, find
from acutance.lab.reproduce.target import Row, Target

__all__ = ["TARGETS", "Row", "Target", "find"]
