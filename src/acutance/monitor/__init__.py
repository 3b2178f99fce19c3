"""Watch a model while it trains: metrics on a fixed probe batch, every so many optimiser steps."""

from acutance.monitor.core import Monitor
from acutance.monitor.history import History

__all__ = ["History", "Monitor"]
