"""A queue of two-layer models on the digits: four tuning runs and one that reads the test set."""

FIELDS = '["task.model.depth=2", "task.model.dim=6", "task.fraction=0.2", "loop.epochs=2", "loop.batch_size=16"'
FIELDS += ', "loop.monitor_every=none", "loop.checkpoint_every=4"]'
TOY = f"""
format = "acutance-queue/1"

[[block]]
name = "toy"
title = "A toy"
kind = "tune"
recipe = "digits"
seeds = [101, 102]
seconds = 10
set = {FIELDS}
row = [
    {{label = "plain"}},
    {{label = "eigen −", set = ["task.model.mitigation=eigen:negative,basis=polar", "optim.name=muon"]}},
]

[[block]]
name = "toy-final"
title = "A toy, tested"
kind = "final"
recipe = "digits"
seeds = [1]
seconds = 1000
set = {FIELDS}
row = [{{label = "plain"}}]
"""


def write(folder, text=TOY):
    path = folder / "queue.toml"
    path.write_text(text, encoding="utf-8")
    return path
