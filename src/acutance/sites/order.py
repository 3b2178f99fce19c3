"""Whether tokens keep their places from layer to layer, checked in the first forward pass after a mitigation came in.

v⁰ − v compares tokens by their places. A model that shuffles or shifts its tokens outside of attention would have each
token pulled to the first values of another one.
"""

import torch
from torch import Tensor

from acutance.errors import AcutanceError


class TokenOrder:
    """The place that each token had in the first block, followed as long as tokens are only moved.

    Tokens are recognised by a number made of their bits. Nothing waits for the device before `refuse_moved`.
    """

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []  # the tokens' numbers, and their places; first those of the stream
        self.first: Tensor | None = None  # the places of what entered the first attention
        self.moved: dict[str, Tensor] = {}  # by the attention's name: whether its tokens stand elsewhere

    def enter_block(self, x: Tensor) -> None:
        """The stream enters a block."""
        self.look(x)
        del self.seen[:-1]

    def look(self, x: Tensor) -> Tensor:
        """The places of the tokens of x: the stream's, unless x holds the same tokens as something seen, but moved."""
        bits = x.detach().contiguous().view(torch.uint8).long()
        factors = torch.randint(2**62, bits.shape[-1:], generator=torch.Generator().manual_seed(0)).to(x.device)
        numbers = (bits * factors).sum(-1).flatten()
        order = numbers.argsort(stable=True)
        rank = order.argsort()
        alike = [seen for seen in self.seen if len(seen[0]) == len(numbers)]
        places = alike[0][1].to(x.device) if alike else torch.arange(len(numbers), device=x.device)
        for others, stood in ((a.to(x.device), b.to(x.device)) for a, b in alike):
            from_order = others.argsort(stable=True)
            is_same = (others[from_order] == numbers[order]).all()
            places = torch.where(is_same, stood[from_order][rank], places)
        self.seen.append((numbers, places))
        return places

    def attend(self, name: str, x: Tensor) -> None:
        """The tokens enter the attention of this name."""
        places = self.look(x)
        if self.first is None:
            self.first = places
        elif len(places) == len(self.first):  # fewer tokens are refused by their shape
            self.moved[name] = (places != self.first.to(places.device)).any()

    def refuse_moved(self) -> None:
        """Raise if some layer has its tokens in another order than the first."""
        moved = [name for name, is_moved in self.moved.items() if not is_moved.is_meta and is_moved]
        if moved:
            raise AcutanceError(
                f"the tokens that enter {moved[0]} stand in another order than those of the first layer, so v⁰ of one "
                "token would meet v of another: a mitigation with v⁰ cannot be used in this model"
            )
