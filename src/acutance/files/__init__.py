"""Files that appear whole or not at all, and locks between processes.

Any room may use them. They import nothing of the package but its errors.
"""
