"""Plain data in; tables, figures and one offline HTML page out.

Callers hand over rows, arrays and results. This room imports no other room but `files`.
"""
