"""Training, data, evaluation and the papers' tables: everything that stands on the core. Only cli imports it."""
