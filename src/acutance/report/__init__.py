"""Plain data in; tables, figures and one offline HTML page out.

Callers hand over rows, arrays and the dataclasses defined here. This room imports no other room but `files`.
"""

from acutance.report.page import write_page
from acutance.report.pictures import plot_attention, plot_curves

__all__ = ["plot_attention", "plot_curves", "write_page"]
