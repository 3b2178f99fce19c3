"""Which tokens of a batch count, and how they fall into samples: padding, packed documents, special tokens."""

from __future__ import annotations

import sys
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from acutance.attention import AttentionCall
from acutance.attention.operator import AttentionOperator
from acutance.errors import AcutanceError, ShapeError

SPECIAL = "special_tokens_mask"  # the tokeniser's class and separator tokens; no model takes it
# The usual arguments, and whether they mark content or padding. NaFlex models of timm take patch_valid.
PADDING = {"attention_mask": True, "src_key_padding_mask": False, "key_padding_mask": False, "patch_valid": True}
DECODER_PADDING = {"decoder_attention_mask": True, "tgt_key_padding_mask": False}
IMAGE_PADDING = ("pixel_attention_mask", "pixel_mask", "patch_valid")  # True where there is an image
HIDDEN = -1e4  # a bias as low as that hides a key: libraries write −10000, the lowest number of a dtype, or −∞


def possible_rows(batch: Any) -> tuple[Container[int], int]:
    """How many rows of tokens a model may make of a batch, if its first axis is the samples; and the most if not."""
    fed = _fed(batch)
    tensors = [x for x in fed if isinstance(x, Tensor) and x.ndim > 0]
    if not tensors or any(isinstance(x, (list, tuple)) for x in fed):  # samples of any shape, one by one
        return range(sys.maxsize), sys.maxsize
    possible = {len(x) for x in tensors}
    for x in tensors:  # several choices, images or frames a sample
        if x.ndim > 4 or (x.ndim == 3 and not x.is_floating_point()):
            possible.update(range(len(x), len(x) * x.shape[1] + 1))
    return possible, max([*possible, *(x.shape[1] for x in tensors if x.ndim in (2, 3))])  # tokens may come first


class Documents(NamedTuple):
    """Documents packed one after another in the rows of a batch."""

    labels: Tensor  # the number of the document each token is in, (batch, tokens)
    rows: Tensor  # the row each document is in
    positions: Tensor  # where its tokens are, (documents, longest)
    inside: Tensor  # whether there is a token, (documents, longest)

    @classmethod
    def of(cls, position_ids: Tensor) -> Documents:
        """Split rows into documents where positions stop counting up."""
        starts = torch.ones_like(position_ids, dtype=torch.bool)
        starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
        labels = starts.flatten().cumsum(0).view_as(starts) - 1
        rows, first = starts.nonzero(as_tuple=True)
        lengths = labels.flatten().bincount()
        steps = torch.arange(int(lengths.max()))
        return cls(labels, rows, (first[:, None] + steps).clamp(max=starts.shape[1] - 1), steps < lengths[:, None])

    def to(self, device: torch.device) -> Documents:
        return Documents(*(x.to(device) for x in self))

    def split(self, x: Tensor) -> Tensor:
        """Rows (batch, tokens, …) to documents (documents, longest, …); places outside repeat other tokens."""
        return x[self.rows[:, None], self.positions]


@dataclass(frozen=True)
class TokenLayout:
    """How the tokens of a batch fall into samples."""

    mask: Tensor | None = None  # (batch, tokens), True where a token counts; None where all do
    special_token_counts: tuple[int, int] = (0, 0)  # special tokens left out at the front and at the back
    documents: Documents | None = None  # None where every row is a sample
    excludes_special: bool = False  # whether tokens that the tokeniser marked as special do not count
    _kept: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)  # by shape and device

    @classmethod
    def of(
        cls,
        batch: Any,
        *,
        special_token_counts: tuple[int, int] = (0, 0),
        special: bool = True,
        decoder: bool = False,
        images: bool = False,
    ) -> TokenLayout:
        """Read the arguments that `measure` feeds to a model.

        Tokens that the tokeniser marked count if `special`. A `decoder` may have its own masks. Beside `images`, other
        masks and positions are those of a text.
        """
        if not isinstance(batch, Mapping):
            return cls(None, special_token_counts)
        for inside in [value for value in batch.values() if isinstance(value, Mapping)]:
            batch = {**inside, **batch}  # NaFlex models of timm may be given everything in one argument
        if images:
            return cls(_image_padding(batch), special_token_counts)
        decoder = decoder and any(str(name).startswith(("decoder_", "tgt")) for name in batch)  # OPT's has none
        documents = None if decoder else _packed(batch)
        padding = mask = _padding(batch, DECODER_PADDING if decoder else PADDING, is_packed=documents is not None)
        excludes_special = not special and not decoder and isinstance(batch.get(SPECIAL), Tensor)
        if excludes_special:
            content = ~batch[SPECIAL].bool()
            mask = content if padding is None else padding & content
        mask = None if mask is None or bool(mask.all()) else mask
        # Models take restarting positions for packed documents only where no mask marks padding.
        return cls(mask, special_token_counts, documents if padding is None else None, excludes_special)

    @cached_property
    def filled(self) -> NDArray[np.bool_] | None:
        """Which samples have a token that counts; None where all have."""
        if self.mask is None:
            return None
        counts, (front, back) = self.mask.cpu(), self.special_token_counts
        if self.documents is None:
            counts = counts[:, front : counts.shape[1] - back]
        else:
            counts = self.documents.inside & self.documents.split(counts)
        filled = counts.any(1).numpy()
        return None if filled.all() else filled

    def tokens(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Tokens (samples, tokens, channels), and which of them count."""
        kind = (tokens.shape[:2], tokens.device)  # mostly that of every layer
        if kind not in self._kept:
            self._kept[kind] = self._counted(tokens)
        documents, mask = self._kept[kind]
        return (tokens if documents is None else documents.split(tokens)), mask

    def _counted(self, tokens: Tensor) -> tuple[Documents | None, Tensor | None]:
        """The documents the tokens are in, and which of the tokens count."""
        mask, (front, back) = self.mask, self.special_token_counts
        if mask is not None and mask.shape != tokens.shape[:2]:
            raise ShapeError(
                f"the batch's mask is {tuple(mask.shape)}, but the tokens are {tuple(tokens.shape)}, so which of them "
                "are padding is not known: measure samples of one size together, or one by one, without padding. A "
                "model that takes only padded samples, such as Whisper, is fed without this mask, and padding counts"
            )
        mask = None if mask is None else mask.to(tokens.device)
        if front or back:
            content = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
            content[:, :front] = content[:, tokens.shape[1] - back :] = False
            mask = content if mask is None else mask & content
        if self.documents is None:
            return None, mask
        documents = self.documents.to(tokens.device)
        return documents, documents.inside if mask is None else documents.inside & documents.split(mask)

    def refuse_mixing(self, A: AttentionOperator) -> None:
        """Raise if the attention's mask lets packed documents see each other."""
        if self.documents is None:
            return
        if A.mask4 is not None:
            labels = self.documents.labels.to(A.device)
            across = labels[:, None, :, None] != labels[:, None, None, :]
            visible = A.mask4 if A.mask4.dtype == torch.bool else A.mask4 > HIDDEN
            if not bool((visible & (across.tril() if A.causal else across)).any()):
                return
        raise AcutanceError(
            "position_ids start anew, as for documents packed into one row, but this model does not keep such "
            "documents apart. Give the documents as rows of their own"
        )

    def record(self, record: AttentionCall) -> AttentionCall:
        """The record with each document as a sample."""
        if self.documents is None:
            return record
        documents, A = self.documents.to(record.branch.device), record.A

        def split(x: Tensor) -> Tensor:  # (batch, heads, tokens, width)
            return documents.split(x.transpose(1, 2)).transpose(1, 2)

        mask = documents.inside[:, None, None, :]
        if A.mask4 is not None:
            rows, places = documents.rows[:, None, None], documents.positions
            own = A.mask4.expand(A.shape[0], -1, A.shape[2], -1)[rows, :, places[:, :, None], places[:, None, :]]
            own = own.permute(0, 3, 1, 2)
            mask = own & mask if own.dtype == torch.bool else own.masked_fill(~mask, -torch.inf)
        operator, branch = A.replace(q=split(A.q), k=split(A.k), mask=mask), documents.split(record.branch)
        per_head: dict[str, Any] = {name: split(getattr(record, name)) for name in ("v", "values", "output")}
        return replace(record, operator=operator, branch=branch, **per_head)


def refuse_single(batches: object) -> None:
    """Refuse a batch in place of batches: its rows or names would be read as batches."""
    if isinstance(batches, (Tensor, Mapping)):
        what = f"a tensor {tuple(batches.shape)}" if isinstance(batches, Tensor) else f"a {type(batches).__name__}"
        raise AcutanceError(f"batches is {what}, which is one batch: write [batch], or pass a DataLoader")


def _fed(batch: Any) -> list[Any]:
    """The arguments that a batch of any accepted form feeds."""
    if isinstance(batch, Mapping):
        return [x for value in batch.values() for x in (_fed(value) if isinstance(value, Mapping) else [value])]
    return [batch[0] if isinstance(batch, (tuple, list)) and batch else batch]


def _rows(batch: Mapping[str, Any]) -> int:
    inputs = (batch.get(name) for name in ("input_ids", "inputs_embeds"))
    return next((len(x) for x in inputs if isinstance(x, Tensor)), 1)


def _packed(batch: Mapping[str, Any]) -> Documents | None:
    positions = batch.get("position_ids")
    if not isinstance(positions, Tensor) or positions.ndim != 2:
        return None
    if len(positions) == 1:  # models broadcast one row of positions over the batch
        positions = positions.expand(_rows(batch), -1)
    documents = Documents.of(positions.cpu())
    return documents if len(documents.rows) > len(positions) else None


def _image_padding(batch: Mapping[str, Any]) -> Tensor | None:
    for name in IMAGE_PADDING:
        mask = batch.get(name)
        if not isinstance(mask, Tensor) or bool(mask.all()):
            continue
        if mask.ndim == 2:
            return mask.bool()
        raise ShapeError(
            f"{name} is {tuple(mask.shape)} and marks padding, but which tokens are padding is known only from "
            "(batch, tokens): measure images without padding, those of one size together"
        )
    return None


def _padding(batch: Mapping[str, Any], names: Mapping[str, bool], *, is_packed: bool) -> Tensor | None:
    for name, marks_content in names.items():
        mask = batch.get(name)
        if not isinstance(mask, Tensor):
            continue
        if marks_content and mask.ndim > 2:
            return _padding_of_pairs(name, mask, _rows(batch), is_packed=is_packed)
        if mask.ndim == 2 or (mask.ndim == 1 and not marks_content):  # one axis: a sample by itself
            content: Tensor = torch.atleast_2d(mask).bool()
            return content if marks_content else ~content
    return None


def _padding_of_pairs(name: str, mask: Tensor, rows: int, *, is_packed: bool) -> Tensor | None:
    """The padding in a mask (batch, heads, queries, keys), if every query sees the same keys."""
    is_clear, visible = True, mask.bool()
    if mask.is_floating_point():  # added to the logits, or zeros and ones
        is_added = bool((mask <= 0).all()) or bool((mask <= HIDDEN).any())
        is_clear = is_added or mask.ndim == 3 or bool((mask == 1).all())
        visible = mask > HIDDEN if is_added else visible
    if is_clear:
        keys = visible.any(-2, keepdim=True)
        is_seeing = visible.any(-1, keepdim=True)  # padding may be kept from seeing anything
        one = keys[:, :1] if mask.ndim == 4 else keys
        if bool((keys == one).all()) and bool((visible == keys & is_seeing).all()):
            tokens = one.flatten(1)
            return tokens.expand(rows, -1) if len(tokens) == 1 else tokens
        if is_packed:  # it keeps documents apart, which `refuse_mixing` checks
            return None
    raise ShapeError(
        f"{name} is {tuple(mask.shape)} and does not clearly hide the same keys from all queries, so which tokens are "
        f"padding is not known: give {name} as (batch, tokens), with 0 for padding"
    )
