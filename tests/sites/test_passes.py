"""A forward pass belongs to its thread, and nothing of it outlives it: threads, export, memory, and refusals."""

import gc
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import hf_zoo
import pytest
import torch
from test_anybody import assert_exact, formula, gpt, gradients, ids
from tiny_models import left_alone
from torch import nn

import acutance as ac
from acutance import sites
from acutance.errors import AcutanceError

SPEC = "neutreno:0.6"


def in_threads(count, work):
    """All start together; what goes wrong in one is raised here."""
    barrier = threading.Barrier(count)

    def run(number):
        barrier.wait()
        return [work(number) for _ in range(5)][-1]

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


@pytest.mark.parametrize("form", ["sdpa", "matmul"])
def test_threads_on_one_model_have_their_own_first_values(form):
    model = gpt(form, checkpointed=True)
    ac.mitigate(model, SPEC)
    found = in_threads(3, lambda number: gradients(model, model(ids(seed=number, count=5 + number))))
    for number, grads in enumerate(found):
        wanted = gradients(model, formula(model, ids(seed=number, count=5 + number)))
        torch.testing.assert_close(grads, wanted, rtol=1e-9, atol=1e-13)


def test_threads_on_a_model_of_transformers():
    model, inputs = hf_zoo.build("llama"), hf_zoo.batch("llama", padded=False)
    ac.mitigate(model, SPEC)
    batches = [{name: x[:, number:] for name, x in inputs.items()} for number in range(3)]
    with torch.no_grad():
        alone = [hf_zoo.output(model, batch) for batch in batches]
        found = in_threads(3, lambda number: hf_zoo.output(model, batches[number]))
    assert all(torch.equal(one, other) for one, other in zip(found, alone, strict=True))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("form", ["sdpa", "einsum"])
def test_an_exported_program_is_exact_or_refused(form, strict):
    torch._dynamo.reset()
    model, tokens = gpt(form).eval(), ids()
    ac.mitigate(model, SPEC)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(model, (tokens,), strict=strict)
    except (AcutanceError, torch._dynamo.exc.TorchDynamoException, RuntimeError, AssertionError):
        assert strict, "only what Dynamo traces may be refused"  # on torch 2.6 by an assertion of its own
        return
    torch.testing.assert_close(program.module()(tokens), formula(model, tokens), rtol=1e-10, atol=1e-12)


def test_nothing_outlives_a_pass_whose_graph_is_gone():
    model = gpt()
    ac.mitigate(model, SPEC)
    passes = sites.find(model)[0].stack.passes
    kept = []
    sites.find(model)[1].attention.register_forward_hook(lambda *_: kept.append(weakref.ref(passes.current().v0)))
    for seed in range(4):
        gradients(model, model(ids(seed)))
    model(ids())  # without a backward pass
    with torch.no_grad():
        model(ids())  # what is gone is forgotten as the next pass begins
    gc.collect()
    assert passes.current() is None
    assert not any(ref() is not None for ref in kept)
    assert not passes._by_input


def test_a_pass_that_fails_leaves_none_under_way():
    model = gpt()
    ac.mitigate(model, SPEC)
    with pytest.raises(IndexError):
        model(ids() + 100)
    assert sites.find(model)[0].stack.passes.current() is None
    torch.testing.assert_close(model(ids()), formula(model, ids()), rtol=1e-10, atol=1e-12)


def test_a_gradient_taken_in_the_middle_of_a_pass_leaves_it_as_it_was():
    """Recomputation in it belongs to another pass, after which the first one goes on."""
    model = gpt(checkpointed=True)
    ac.mitigate(model, SPEC)
    others = [model(ids(seed=1))]
    model.checkpointed = False

    def interrupt(*_):
        if others:
            gradients(model, others.pop())

    hook = model.h[1].register_forward_hook(interrupt)
    out = model(ids())
    hook.remove()
    assert_exact(model, None, ids(), out)


REFUSED = [
    ({"layers": [1.5]}, "whole numbers"),
    ({"layers": "1"}, "list of numbers"),
    ({"layers": [True]}, "whole numbers"),
    ({"layers": [1, 4]}, "1 to 3"),
    ({"layers": []}, "1 to 3"),
    ({"part": "encoder"}, "no part 'encoder'"),
]


@pytest.mark.parametrize(("options", "match"), REFUSED, ids=str)
def test_bad_input_is_refused_before_anything_changes(options, match):
    model = gpt()
    with left_alone(model, lambda: model(ids())), pytest.raises(AcutanceError, match=match):
        ac.mitigate(model, SPEC, **options)


def test_an_optimiser_that_was_made_before_is_told_of_new_parameters():
    model = gpt()
    optimiser = torch.optim.AdamW(model.parameters())
    with pytest.warns(ac.AcutanceWarning, match="parameter_groups"):
        handle = ac.mitigate(model, "attnscale")
    groups = handle.parameter_groups(lr=0.1, weight_decay=0.0)
    optimiser.add_param_group(groups[0])
    new = {id(p) for name, p in model.named_parameters() if ".mitigation." in name}
    assert {id(p) for group in groups for p in group["params"]} == new
    assert groups[0]["lr"] == 0.1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ac.mitigate(nn.Sequential(*gpt().h), "attnscale")  # another model's optimiser is none of its business
