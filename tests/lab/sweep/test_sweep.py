"""Sweeps on tiny models: what is tried, what is kept, what is compared, and what is said."""

import math
from dataclasses import replace

import pytest
import torch

import acutance as ac
from acutance.diagnose.quality import Quality, objective_of
from acutance.errors import AcutanceError
from acutance.lab.data import digits
from acutance.lab.sweep import run
from acutance.lab.sweep.fine_tune import FineTune, fine_tune
from acutance.lab.sweep.run import specs_of, sweep
from acutance.lab.sweep.table import Reading, Sweep, Trial
from tiny_folders import tiny

TRIED = ["featscale", "neutreno:0", "neutreno:0.9", "neutreno:0.9,learn=head"]


@pytest.fixture(scope="module")
def vit():
    torch.manual_seed(0)
    model = ac.models.vit_digits(dim=12, depth=3, heads=2)
    for weight in model.parameters():
        weight.data += 0.1 * torch.randn_like(weight)  # so that a step shows
    return model.eval()


@pytest.fixture(scope="module")
def batches():
    return [*digits()[1].batches(32)][:4]


@pytest.fixture(scope="module")
def tuned(vit, batches):
    return sweep(vit, batches, TRIED, fine_tune=6, lr=1e-3, progress=False)


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_what_starts_at_the_identity_changes_nothing_before_training(vit, batches):
    before, state = weights(vit), torch.get_rng_state()
    found = sweep(vit, iter(batches), TRIED, progress=False)
    assert same(weights(vit), before)
    assert torch.equal(torch.get_rng_state(), state)
    plain = found.control.start
    assert plain.qualities[0].name == "accuracy"
    assert len(plain.qualities[0].values) == 128
    for spec in ("featscale", "neutreno:0.0", "neutreno:0.9,learn=head"):
        assert found[spec].start == found[spec].end == plain
    assert found["neutreno:0.9"].start != plain
    added = {trial.spec: trial.added for trial in found.trials}
    assert added == {"none": 0, "featscale": 72, "neutreno:0.0": 0, "neutreno:0.9": 0, "neutreno:0.9,learn=head": 4}
    profile = ac.measure(vit, batches, metrics=["token_cosine"], progress=False)
    assert plain.cosine == profile["token_cosine"][-1]


def test_all_are_fine_tuned_alike_and_judged_on_other_data(vit, batches, tuned):
    assert tuned.context["split"] == "2 batches train and 2 others evaluate"
    assert tuned["neutreno:0.0"].end == tuned.control.end != tuned.control.start
    assert tuned.change(tuned["neutreno:0.0"]).value == 0
    assert len(tuned.control.quality.values) == 64
    again = sweep(vit, batches, ["featscale"], fine_tune=6, lr=1e-3, progress=False)
    assert again["featscale"].end == tuned["featscale"].end
    changed = [(images.flip(0), labels.flip(0)) for images, labels in batches[:2]]  # other rows of the same batches
    other = sweep(vit, [*changed, *batches[2:]], ["featscale"], fine_tune=6, lr=1e-3, seed=1, progress=False)
    assert other["featscale"].start == tuned["featscale"].start
    assert other["featscale"].end != tuned["featscale"].end


def test_only_the_remedy_learns_if_asked(vit, batches):
    model = ac.models.vit_digits(dim=12, depth=3, heads=2)
    model.load_state_dict(vit.state_dict())
    model.blocks[1].eval()
    before, modes = weights(model), [module.training for module in model.modules()]
    handle, objective = ac.mitigate(model, "featscale"), objective_of(model, batches)
    fine_tune(model, batches[:2], objective, FineTune(3, "remedy"), handle)
    assert same(before, {name: value for name, value in weights(model).items() if "mitigation" not in name})
    assert all(value.any() for name, value in model.state_dict().items() if "mitigation" in name)
    assert all(parameter.requires_grad for parameter in model.parameters())
    handle.remove()
    assert modes == [module.training for module in model.modules()]
    untouched = sweep(vit, batches, [], fine_tune=3, train="remedy", progress=False)
    assert untouched.control.end == untouched.control.start  # nothing to train


def test_a_step_is_adamws(vit, batches):
    """Against a loop written out, one batch: warm-up is over in the first step, the rate falls from then on."""
    one, other = ac.models.vit_digits(dim=12, depth=3, heads=2), ac.models.vit_digits(dim=12, depth=3, heads=2)
    for model in (one, other):
        model.load_state_dict(vit.state_dict())
    fine_tune(one, batches[:1], objective_of(one, batches), FineTune(4, lr=1e-3))
    optimiser, (images, labels) = torch.optim.AdamW(other.parameters(), weight_decay=0.0), batches[0]
    for step in range(4):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(other(images), labels).backward()
        torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        optimiser.param_groups[0]["lr"] = 1e-3 * (1 - step / 4)
        optimiser.step()
    torch.testing.assert_close(weights(one), weights(other), rtol=1e-5, atol=1e-6)


def test_what_cannot_work_is_a_row_with_its_reason():
    llama = tiny("llama", "AutoModelForCausalLM", vocab_size=40)
    ids = torch.randint(0, 40, (4, 8), generator=torch.Generator().manual_seed(1))
    found = sweep(llama, [{"input_ids": ids}], ["featscale", "eigen", "neutreno:0.4"], progress=False)
    assert "causal" in found["featscale"].reason
    assert found["eigen:negative"].reason
    assert found["featscale"].end is None
    assert found.sorted()[-1].end is None
    assert found["neutreno:0.4"].quality.name == "perplexity"
    assert "None is worth it here: of 1, none improved perplexity" in found.verdict()
    assert "causal" in str(found)


def test_an_interrupted_sweep_resumes_to_the_same(vit, batches, tuned, tmp_path, monkeypatch):
    path, how = tmp_path / "sweep.json", {"fine_tune": 6, "lr": 1e-3, "progress": False}
    mitigate, calls = run.mitigate, []

    def stopped(model, spec, **more):
        calls.append(spec)
        if spec == "neutreno:0.9" and len(calls) == 3:
            raise KeyboardInterrupt
        return mitigate(model, spec, **more)

    monkeypatch.setattr(run, "mitigate", stopped)
    with pytest.raises(KeyboardInterrupt):
        sweep(vit, batches, TRIED, path=path, **how)
    assert [trial.spec for trial in Sweep.load(path).trials] == ["none", "featscale", "neutreno:0.0"]
    found = sweep(vit, batches, TRIED, path=path, **how)
    assert calls == ["featscale", *["neutreno:0.0", "neutreno:0.9"], "neutreno:0.9", "neutreno:0.9,learn=head"]
    untimed = [[replace(trial, time=0.0) for trial in one.trials] for one in (found, Sweep.load(path), tuned)]
    assert untimed[0] == untimed[1] == untimed[2]
    assert Sweep.load(path).verdict() == found.verdict()
    assert len(found.to_frame()) == 5
    for change in ({"fine_tune": 5}, {"lr": 1e-4}, {"quality": "cross-entropy"}):
        with pytest.raises(AcutanceError, match=r"is another sweep .*name another file"):
            sweep(vit, batches, TRIED, path=path, **how | change)
    with pytest.raises(AcutanceError, match="samples: there"):
        sweep(vit, batches[::-1], TRIED, path=path, **how)
    other = replace(vit.config, depth=2).to_dict()
    with pytest.raises(AcutanceError, match="weights: there"):
        sweep(ac.models.ViT(**other), batches, TRIED, path=path, **how)


class Louder(ac.Mitigation):
    """Twice the attention; registered nowhere."""

    def output(self, u, w, call):
        return 2 * u


def test_a_remedy_of_ones_own_is_tried(vit, batches):
    found = sweep(vit, batches[:1], [Louder()], progress=False)
    assert found["louder"].reason == ""
    assert found["louder"].start != found.control.start


def test_specs():
    assert specs_of("neutreno:0.4,learn=head, featscale") == ["none", "neutreno:0.4,learn=head", "featscale"]
    assert specs_of("featscale+neutreno:start=0.1,learn=layer,attnscale")[1:] == [
        "featscale+neutreno:0.6,learn=layer,start=0.1", "attnscale",
    ]  # fmt: skip
    assert specs_of("neutreno,FeatScale", [0.1, 0.4])[1:] == [
        "neutreno:0.1", "neutreno:0.4", "neutreno:0.6,learn=head", "featscale",
    ]  # fmt: skip
    everything = specs_of("all")
    assert {spec.partition(":")[0] for spec in everything} == {*run.REGISTRY}
    assert specs_of([ac.NeuTRENO(0.3), "none"]) == ["none", "neutreno:0.3"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"remedies": "neutrino"}, "unknown remedy 'neutrino'; did you mean neutreno; there are"),
        ({"remedies": ["neutreno:strong"]}, "strength must be a finite number"),
        ({"strengths": [math.inf]}, "strength inf is no finite number"),
        ({"fine_tune": -1}, "fine-tune -1 steps"),
        ({"train": "some"}, "train 'some' is not one of all, remedy"),
        ({"fine_tune": 3, "count": 1}, "1 batch cannot be split"),
        ({"fine_tune": 3, "labels": False}, "nothing to fine-tune for: quality not measured"),
        ({"fine_tune": 3, "dtype": torch.bfloat16}, "small steps are lost in bfloat16 weights"),
        ({"mitigation": "featscale"}, "carries 'featscale' already"),
    ],
)
def test_bad_input_is_refused_before_the_work(given, message, batches, monkeypatch):
    given = {"remedies": "featscale", "count": 2, "labels": True, "dtype": torch.float32, "mitigation": None, **given}
    model = ac.models.vit_digits(dim=12, depth=1, heads=2, mitigation=given.pop("mitigation")).to(given["dtype"])
    labelled, dtype = given.pop("labels"), given.pop("dtype")
    data = [(images.to(dtype), labels)[: 1 + labelled] for images, labels in batches[: given.pop("count")]]
    monkeypatch.setattr(run, "measure", None)  # nothing may be measured
    with pytest.raises(AcutanceError) as refused:
        sweep(model, data, **given)
    assert message in str(refused.value)


def made(changes, steps=0, n=50):
    """A sweep whose remedies change the loss by so much, give or take a hundredth."""
    noise = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = ((noise - noise.mean()) / noise.std()).tolist()

    def trial(spec, change):
        values = tuple(x + change + 0.01 * (x if change else 0) for x in noise)
        before = tuple(value + 5 for value in values) if steps else values
        start, end = (Reading((Quality("loss", False, told, (1.0,) * n),), 0.5) for told in (before, values))
        return Trial(spec, start=start, end=end)

    trials = [trial("none", 0.0), *(trial(spec, change) for spec, change in changes.items())]
    return Sweep(tuple(trials), {"fine_tune": {"steps": steps}})


def test_the_verdict_says_what_is_worth_it_and_against_what():
    found = made({"a": 0.3, "b": -0.1, "c": -0.2}, steps=5)
    said = "Worth it here: c, b improved loss; 1 of 3 worsened it (compared with plain fine-tuning, by intervals that"
    assert found.verdict().startswith(said)
    assert [trial.spec for trial in found.sorted()] == ["c", "b", "none", "a"]
    # 0.003 lies outside one 95 % interval, and inside one that allows for 40 comparisons.
    lucky = made({f"{i}": 0.003 for i in range(39)} | {"lucky": -0.003})
    assert lucky.change(lucky["lucky"]).verdict == "better"
    assert lucky.verdict().startswith("None is worth it here: of 40, none improved loss and 0 worsened it (compared")
    bare = Sweep(tuple(replace(t, start=Reading((), 0.5), end=Reading((), 0.5)) for t in found.trials), {})
    assert bare.verdict() == "Quality was not measured, so no remedy can be called worth it."
    assert "quality not measured" in str(bare)
