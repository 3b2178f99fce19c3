"""The command line: options that verbs share, what they print, and the verbs of the core, one thin function each.

A verb turns options into one call of the library and prints what it gives. No formula stands here, and torch is not
imported before a verb runs. The verbs of the laboratory are in `lab/commands.py`; `__main__` puts all together.
"""
