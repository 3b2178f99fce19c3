import pytest
import torch

from acutance.errors import AcutanceError
from acutance.lab.data import fraction, held_out
from acutance.lab.data.subsets import class_ranks


@pytest.fixture
def labels() -> torch.Tensor:
    return torch.randint(7, (400,), generator=torch.Generator().manual_seed(0))


def test_ranks_count_what_stands_before(labels: torch.Tensor) -> None:
    plain = [int((labels[:i] == labels[i]).sum()) for i in range(len(labels))]
    assert class_ranks(labels).tolist() == plain


def test_the_held_out_slice_is_every_tenth_of_each_class(labels: torch.Tensor) -> None:
    held = held_out(labels)
    for label in range(7):
        of_class = (labels == label).nonzero()[:, 0]
        assert of_class[9::10].tolist() == of_class[held[of_class]].tolist()


def test_fractions_are_balanced_nested_and_the_first_of_each_class(labels: torch.Tensor) -> None:
    parts = {share: fraction(labels, share) for share in (0.1, 0.5, 1.0)}
    assert parts[1.0].tolist() == list(range(400))
    assert set(parts[0.1].tolist()) < set(parts[0.5].tolist())
    for share, indices in parts.items():
        for label in range(7):
            of_class = (labels == label).nonzero()[:, 0]
            size = -(-len(of_class) * round(10 * share) // 10)
            assert indices[labels[indices] == label].tolist() == of_class[:size].tolist()


def test_a_tenth_of_an_exact_multiple_is_exact() -> None:
    # 0.1 as a binary number is a little over a tenth: its ceiling would be one too many.
    assert len(fraction(torch.zeros(500, dtype=torch.long), 0.1)) == 50


@pytest.mark.parametrize("part", [0.0, -0.5, 1.5])
def test_impossible_fractions_are_refused(part: float) -> None:
    with pytest.raises(AcutanceError, match=r"\(0, 1\]"):
        fraction(torch.zeros(3, dtype=torch.long), part)
