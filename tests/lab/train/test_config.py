import json
from operator import attrgetter

import pytest
from tiny_runs import tiny

from acutance.errors import AcutanceError
from acutance.lab import recipes
from acutance.lab.data.augment import AugmentConfig
from acutance.lab.train import Config, OptimConfig, override
from acutance.lab.train.config import incidental_fields


def every_field(data, prefix=""):
    for name, value in data.items():
        if isinstance(value, dict):
            yield from every_field(value, f"{prefix}{name}.")
        elif name != "kind":
            yield f"{prefix}{name}={value if isinstance(value, str) else json.dumps(value)}"


def test_any_field_can_be_set_to_what_it_is():
    for assignment in every_field(tiny().to_dict()):
        assert override(tiny(), [assignment]) == tiny(), assignment


@pytest.mark.parametrize(
    ("field", "text", "expected"),
    [
        ("optim.lr", "1e-3", 1e-3),
        ("optim.betas", "[0.9, 0.98]", (0.9, 0.98)),
        ("optim.clip", "none", None),
        ("loop.compile", "True", True),
        ("loop.seed", "3", 3),
        ("task.dataset", "123", "123"),
        ("task.data_dir", "/some=where", "/some=where"),
        ("task.augment", '{"mixup": 0.8}', AugmentConfig(mixup=0.8)),
    ],
)
def test_values_get_the_type_of_their_field(field, text, expected):
    found = attrgetter(field)(override(tiny(), [f"{field}={text}"]))
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("optim.lr", "--set takes name=value"),
        ("optim.lrr=1", r"optim has no field 'lrr', did you mean lr\?; known: name, lr"),
        ("optimizer.lr=1", r"there is no field 'optimizer', did you mean optim\?; known: task, optim, schedule, loop"),
        ("epochs=1", r"no field 'epochs', did you mean loop\.epochs\?; known: task, optim"),
        ("depth=1", r"no field 'depth', did you mean task\.model\.depth\?"),
        ("optim.lr=fast", 'optim.lr is a number, not "fast"'),
        ("loop.seed=1.5", "loop.seed is a whole number, not 1.5"),
        ("loop.compile=yes", 'loop.compile is true or false, not "yes"'),
        ("optim.name=addamw", r'one of adamw, adam, sgd, muon, not "addamw", did you mean adamw\?'),
        ("optim.clip=much", 'optim.clip is a number or null, not "much"'),
        ("optim.betas=[0.9]", r"optim.betas is a list of 2, each a number, not \[0.9\]"),
        ("optim=3", "optim has fields of its own"),
        ("optim.lr.x=3", "optim.lr has no fields of its own"),
        ("loop.accumulate=3", "cannot be cut into 3 equal parts"),
        ("loop.monitor_every=0", "loop.monitor_every must be 1 or more, not 0"),
        ("loop.evaluate_every=0", "loop.evaluate_every must be more than 0, not 0"),
        ("loop.ema=1.5", "loop.ema must be at least 0 and less than 1, not 1.5"),
        ("optim.lr=-1", "optim.lr must be 0 or more, not -1"),
        ("optim.betas=[0.9, 1]", r"optim.betas must be at least 0 and less than 1, not \(0.9, 1.0\)"),
        ("optim.momentum=0.5", r"optim\.momentum is not read by adam"),
        ('optim={"name": "sgd", "betas": [0.8, 0.9]}', r"optim\.betas is not read by sgd"),
        ("task.model.heads=3", "dim 8 cannot be shared out among 3 heads"),
    ],
)
def test_mistakes_are_named(assignment, message):
    with pytest.raises(AcutanceError, match=message):
        override(tiny(), [assignment])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["task"].update(kind="sorting"), "no task is called 'sorting'; there are classification"),
        (lambda d: d["task"].pop("dataset"), "task lacks dataset"),
        (lambda d: d.pop("task"), "with a task in it"),
    ],
)
def test_a_record_that_does_not_fit_is_refused_by_name(change, message):
    data = tiny().to_dict()
    change(data)
    with pytest.raises(AcutanceError, match=message):
        Config.from_dict(data)


def test_fields_that_must_fit_come_in_any_order_and_of_two_assignments_the_last_counts():
    for changes in (["task.model.heads=3", "task.model.dim=12"], ["task.model.dim=12", "task.model.heads=3"]):
        model = override(tiny(), changes).task.model
        assert (model.dim, model.heads) == (12, 3)
    whole = 'optim={"lr": 0.5, "name": "sgd"}'
    assert override(tiny(), [whole, "optim.lr=0.25"]).optim == OptimConfig(name="sgd", lr=0.25)
    assert override(tiny(), ["optim.lr=0.25", whole]).optim == OptimConfig(name="sgd", lr=0.5)


def test_incidental_fields_say_where_and_how_but_not_what():
    found = incidental_fields(recipes.load("camvid"))
    assert {"task.data_dir", "task.windows.at_once", "loop.compile"} <= found
    assert found.isdisjoint({"loop.seed", "loop.epochs", "optim.name", "task.windows.size"})
