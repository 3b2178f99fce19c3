"""Plain data in; tables, figures and one offline HTML page out.

Callers hand over rows, arrays and the dataclasses defined here. This room imports no other room but `files`.
"""
