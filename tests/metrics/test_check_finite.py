"""The message a person reads when a layer has gone to NaN."""

import pytest
import torch

from acutance.errors import NonFiniteError
from acutance.metrics import check_finite


def spoilt(shape, *places, value=torch.nan):
    tokens = torch.zeros(shape)
    for place in places:
        tokens[place] = value
    return tokens


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_message_counts_tokens_and_points_at_the_first(value, dtype):
    tokens = spoilt((2, 197, 4), (0, 12, 1), (0, 12, 3), (0, 40, 0), (1, 5, 2), value=value).to(dtype)
    with pytest.raises(NonFiniteError, match="bfloat16 or float32") as error:
        check_finite(tokens, metric="token_cosine", layer=7)
    message = "layer 7: token_cosine: 3 of 394 tokens hold NaN or infinity (first: sample 0, token 12). "
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("shape", "place", "where"),
    [
        ((5, 3), (4, 0), "1 of 5 tokens hold NaN or infinity (first: token 4)"),
        ((2, 3, 5, 4), (1, 2, 3, 0), "1 of 30 tokens hold NaN or infinity (first: sample 1, head 2, token 3)"),
        ((1, 2, 3, 4, 5), (0, 1, 2, 3, 4), "1 of 24 tokens hold NaN or infinity (first: index [0, 1, 2, 3])"),
    ],
)
def test_the_place_is_named_for_every_shape(shape, place, where):
    with pytest.raises(NonFiniteError) as error:
        check_finite(spoilt(shape, place), metric="head_cosine", layer="final")
    assert f"layer final: head_cosine: {where}" in str(error.value)


def test_tokens_that_do_not_count_are_not_complained_about():
    tokens, mask = spoilt((2, 4, 3), (0, 3, 0)), torch.ones(2, 4, dtype=torch.bool)
    mask[0, 3] = False
    assert check_finite(tokens, metric="norm_spread", layer=2, mask=mask) is None
    tokens[1, 1, 1] = torch.inf
    with pytest.raises(NonFiniteError, match="1 of 7 tokens"):
        check_finite(tokens, metric="norm_spread", layer=2, mask=mask)
