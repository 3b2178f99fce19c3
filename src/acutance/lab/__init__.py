"""Training, data, recipes, evaluation, the papers' tables and benchmarks: everything built on the core.

Nothing in the core imports it. `commands.py` has its verbs for the command line.
"""
