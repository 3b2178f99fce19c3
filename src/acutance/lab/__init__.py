"""Training, data, recipes, evaluation, the papers' tables and benchmarks: everything that stands on the core.

It uses the core by its public names. Nothing in the core imports it. `commands.py` has its verbs for the command line.
"""
