"""A Profile or a set of runs as one offline HTML page, or as a picture."""

from acutance.report.page import write_page
from acutance.report.pictures import attention_picture, curves_picture

__all__ = ["attention_picture", "curves_picture", "write_page"]
