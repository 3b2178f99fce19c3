"""Other ways to checkpoint and compile than the matrix has: exact or refused as well."""

import warnings
from functools import partial
from itertools import islice

import pytest
import torch
from parity_matrix import STEPS, TOLERANCE, distance, gradients_by_name, loss_of, moved, plain_gradients
from parity_subjects import subject_of
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from acutance.errors import AcutanceError

SUBJECT = subject_of("torch.nn", depth=3)
ALLOW = "skip_fwd_side_effects_in_bwd_under_checkpoint"
NON_REENTRANT, REENTRANT = CheckpointImpl.NO_REENTRANT, CheckpointImpl.REENTRANT


@pytest.fixture
def model():
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield SUBJECT.mitigated("multi-head").double()


def wrap(model, kind, *layers):
    for layer in layers:
        model.body.layers[layer - 1] = checkpoint_wrapper(model.body.layers[layer - 1], kind)


def run_by(encoder, forward):
    """Let the encoder's blocks be run by a function of ours."""
    encoder.forward = partial(forward, encoder.layers)


def train(model, run=None):
    for seed in STEPS:
        model.zero_grad()
        inputs = moved(SUBJECT.batch(seed, "multi-head"), "float64", "cpu")
        loss_of(SUBJECT.output(model if run is None else run, inputs)).backward()
    return gradients_by_name(model)


def assert_exact(model, run=None, expected=None):
    expected = plain_gradients(SUBJECT, "multi-head", "float64") if expected is None else expected
    assert distance(train(model, run), expected) < TOLERANCE["float64"]


def assert_refused(model, match, run=None):
    with pytest.raises(AcutanceError, match=match):
        train(model, run)


@pytest.mark.parametrize("kind", [NON_REENTRANT, REENTRANT])
@pytest.mark.parametrize("layers", [(1,), (2,), (3,), (1, 2), (1, 3), (2, 3)])
def test_checkpointing_some_of_the_blocks(model, layers, kind):
    """Re-entrant of the first alone too, where no later block is run again and only v⁰ itself has lost its gradient."""
    wrap(model, kind, *layers)
    assert_exact(model) if kind is NON_REENTRANT else assert_refused(model, "use_reentrant=False")


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("lengths", [(3,), (2, 1)])
def test_checkpoints_of_several_blocks(model, lengths, reentrant):
    """Of all in one even re-entrant: the first block runs again before the others."""

    def forward(layers, x, **_):
        rest = iter(layers)
        for length in lengths:
            x = checkpoint(nn.Sequential(*islice(rest, length)), x, use_reentrant=reentrant)
        return x

    run_by(model.body, forward)
    assert_refused(model, "use_reentrant=False") if reentrant and len(lengths) > 1 else assert_exact(model)


@pytest.mark.parametrize(
    ("kind", "layers"),
    [*((NON_REENTRANT, layers) for layers in ((1, 2, 3), (1,), (2, 3))), (REENTRANT, (1, 2, 3)), (REENTRANT, (1,))],
)
def test_checkpointing_the_attention_alone(model, kind, layers):
    for layer in layers:
        block = model.body.layers[layer - 1]
        block.self_attn = checkpoint_wrapper(block.self_attn, kind)
    assert_exact(model) if kind is NON_REENTRANT else assert_refused(model, "around whole blocks")


def test_first_layers_frozen_by_no_grad_are_not_taken_for_checkpointing(model):
    def forward(layers, x, **_):
        with torch.no_grad():
            x = layers[0](x)
        return layers[2](layers[1](x))

    run_by(model.body, forward)
    train(model)
    assert model.body.layers[0].self_attn.in_proj_bias.grad is None
    assert model.body.layers[1].self_attn.in_proj_bias.grad is not None


def twice(model):
    """Runs the model on two batches before any gradient is taken."""
    return lambda x: torch.cat([model(x), model(x.flip(0, 1))])


def test_two_forward_passes_under_way(model):
    expected = train(model, twice(model))
    wrap(model, NON_REENTRANT, 1, 2, 3)
    assert_exact(model, twice(model), expected)


class MaskFirst(nn.TransformerEncoderLayer):
    def forward(self, mask, x):
        return super().forward(x, src_mask=mask)


def test_blocks_whose_first_tensor_serves_several_forward_passes_are_refused():
    model, mask = SUBJECT.mitigated("multi-head", "neutreno").double(), torch.zeros(7, 7, dtype=torch.float64)

    def forward(layers, x, **_):
        for layer in layers:
            layer.__class__ = MaskFirst
            x = checkpoint(layer, mask, x, use_reentrant=False)
        return x

    run_by(model.body, forward)
    assert_refused(model, "whose first argument is the tokens", twice(model))


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [(), (1, 2, 3)])
def test_compiled_block_by_block_outside_of_checkpoints(model, checkpointed):
    wrap(model, NON_REENTRANT, *checkpointed)
    for layer in model.body.layers:
        layer.compile(backend="aot_eager")
    assert_exact(model)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layers"), [(NON_REENTRANT, (1, 2, 3)), (REENTRANT, (1,)), (REENTRANT, (2,))])
def test_compiled_inside_of_checkpoints_is_refused(kind, layers):
    torch._dynamo.reset()
    model = SUBJECT.mitigated("multi-head", "neutreno").double()  # v⁰ is why
    for layer in model.body.layers:
        layer.compile(backend="aot_eager")
    wrap(model, kind, *layers)
    assert_refused(model, r"torch\.compile around it")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch._dynamo.config, ALLOW), reason="not in this torch")
def test_one_graph_with_checkpoints_is_exact_where_torch_allows_it(model):
    """torch does not trace what leaves a checkpoint on the side, as v⁰ does, unless it is told that this is meant."""
    wrap(model, NON_REENTRANT, 1, 2, 3)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"[Ss]ide effect"):
        train(model, torch.compile(model, backend="aot_eager", fullgraph=True))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(ALLOW, True):  # not monkeypatch, which would delete it afterwards
        assert_exact(model, torch.compile(model, backend="aot_eager", fullgraph=True))
