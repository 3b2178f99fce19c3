"""The embedded default and, later, the real datasets."""

from acutance.data.digits import Split, digits

__all__ = ["Split", "digits"]
