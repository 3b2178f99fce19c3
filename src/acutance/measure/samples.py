"""Which tokens of a batch count, and how they fall into samples: padding, packed documents, special tokens."""

import sys
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import signature
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from acutance.attention import AttentionCall
from acutance.attention.operator import HIDDEN
from acutance.errors import AcutanceError, ShapeError

Fed = Tensor | Mapping[str, Any]  # what goes into a model: one tensor, or keyword arguments
SPECIAL = "special_tokens_mask"  # the tokeniser's class and separator tokens; no model takes it
# The usual arguments. Those of torch end in key_padding_mask and are True for padding. NaFlex models take patch_valid.
PADDING = ("attention_mask", "src_key_padding_mask", "key_padding_mask", "patch_valid")
DECODER_PADDING = ("decoder_attention_mask", "tgt_key_padding_mask")
IMAGE_PADDING = ("pixel_attention_mask", "pixel_mask", "patch_valid")


def possible_rows(batch: Fed) -> tuple[Container[int], Container[int], int]:
    """How many rows of tokens a model may make of a batch, or of grids, if its first axis is the samples.

    Last, the most rows if it is not.
    """
    arguments = arguments_of(batch)
    tensors = [x for x in arguments if isinstance(x, Tensor) and x.ndim > 0]
    if not tensors or any(isinstance(x, (list, tuple)) for x in arguments):  # samples of any shape, one by one
        return range(sys.maxsize), range(sys.maxsize), sys.maxsize
    several = [x for x in tensors if x.ndim > 4 or (x.ndim == 3 and not x.is_floating_point())]  # views, or choices
    lengths = {len(x) for x in tensors}
    counts = [range(len(x), len(x) * x.shape[1] + 1) for x in several]
    grids = lengths.union(*(rows for rows, x in zip(counts, several, strict=True) if x.ndim > 4))  # of views alone
    possible = lengths.union(*counts)
    tokens_first = (x.shape[1] for x in tensors if x.ndim in (2, 3))  # where tokens are the first axis
    return possible, grids, max([*possible, *tokens_first])


class Documents(NamedTuple):
    """Documents packed one after another in the rows of a batch."""

    labels: Tensor  # the number of the document each token is in, (batch, tokens)
    rows: Tensor  # the row each document is in
    positions: Tensor  # where its tokens are, (documents, longest)
    inside: Tensor  # whether there is a token, (documents, longest)

    @classmethod
    def of(cls, position_ids: Tensor, batch: int = 1) -> Self | None:
        """Split the rows of a batch into documents where positions stop counting up; None if each row is one."""
        if len(position_ids) == 1:  # models broadcast one row of positions over the batch
            position_ids = position_ids.expand(batch, -1)
        starts = torch.ones_like(position_ids, dtype=torch.bool)
        starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
        labels = starts.flatten().cumsum(0).view_as(starts) - 1
        rows, first = starts.nonzero(as_tuple=True)
        if len(rows) <= len(starts):
            return None
        lengths = labels.flatten().bincount()
        steps = torch.arange(int(lengths.max()))
        return cls(labels, rows, (first[:, None] + steps).clamp(max=starts.shape[1] - 1), steps < lengths[:, None])

    def to(self, device: torch.device) -> Self:
        return type(self)(*(x.to(device) for x in self))

    def split(self, x: Tensor) -> Tensor:
        """Rows (batch, tokens, …) to documents (documents, longest, …); places outside repeat other tokens."""
        return x[self.rows[:, None], self.positions]

    def refuse_mixing(self, call: AttentionCall) -> None:
        """Raise if the attention's mask lets documents see each other."""
        A, visible = call.A, call.visible()
        labels = self.labels.to(A.device)
        across = labels[:, None, :, None] != labels[:, None, None, :]
        across = across.tril() if A.causal else across
        if bool((across if visible is None else across & visible).any()):
            raise AcutanceError("position_ids restart, yet documents see each other: give them as rows of their own")


@dataclass(frozen=True)
class TokenLayout:
    """How the tokens of a batch fall into samples."""

    mask: Tensor | None = None  # (batch, tokens), True where a token counts; None where all do
    special_token_counts: tuple[int, int] = (0, 0)  # special tokens left out at the front and at the back
    documents: Documents | None = None  # None where every row is a sample
    excludes_special: bool = False  # whether tokens that the tokeniser marked as special do not count
    given: int | None = None  # how many tokens a sample has, where the model pads them to more; None elsewhere
    _kept: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)  # by shape and device

    @classmethod
    def of(
        cls,
        batch: Fed,
        *,
        special_token_counts: tuple[int, int] = (0, 0),
        special: bool = True,
        decoder: bool = False,
        images: bool = False,
        pads: bool = False,
    ) -> Self:
        """Read the arguments that `measure` feeds to a model.

        Tokens that the tokeniser marked count if `special`. A `decoder` may have its own masks. Beside `images`, other
        masks and positions are those of a text. What a model that `pads` adds to the tokens given does not count.
        """
        if isinstance(batch, Tensor):
            batch = {"input_ids": batch} if 1 < batch.ndim < 4 else {}
        for inside in [value for value in batch.values() if isinstance(value, Mapping)]:
            batch = {**inside, **batch}  # NaFlex models of timm may be given everything in one argument
        decoder = decoder and any(str(name).startswith(("decoder_", "tgt")) for name in batch)  # OPT's has none
        names = IMAGE_PADDING if images else DECODER_PADDING if decoder else PADDING
        text = next((x for x in map(batch.get, ("input_ids", "inputs_embeds")) if isinstance(x, Tensor)), None)
        rows = 1 if text is None else len(text)
        documents = None
        if names is PADDING and isinstance(positions := batch.get("position_ids"), Tensor) and positions.ndim == 2:
            documents = Documents.of(positions.cpu(), rows)
        padding = mask = _padding(batch, names, rows, is_packed=documents is not None)
        excludes_special = not special and names is PADDING and isinstance(batch.get(SPECIAL), Tensor)
        if excludes_special:
            content = ~batch[SPECIAL].bool()
            mask = content if padding is None else padding & content
        mask = None if mask is None or bool(mask.all()) else mask
        given = text.shape[1] if pads and text is not None and names is PADDING else None
        # Models take restarting positions for packed documents only where no mask marks padding.
        return cls(mask, special_token_counts, documents if padding is None else None, excludes_special, given)

    @cached_property
    def filled(self) -> NDArray[np.bool_] | None:
        """Which samples have a token that counts; None where all have."""
        counts = None if self.mask is None else self._counted(self.mask.shape, torch.device("cpu"))[1]
        return None if counts is None or bool(counts.any(1).all()) else counts.any(1).numpy()

    def refuse_empty(self) -> Self:
        """The layout itself, where every sample has a token that counts."""
        if self.filled is not None:
            raise AcutanceError(f"sample {self.filled.argmin() + 1} of a batch has no token that counts: leave it out")
        return self

    def tokens(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Tokens (samples, tokens, channels), and which of them count."""
        kind = tokens.shape[:2], tokens.device  # mostly that of every layer
        if kind not in self._kept:
            self._kept[kind] = self._counted(*kind)
        documents, mask = self._kept[kind]
        return (tokens if documents is None else documents.split(tokens)), mask

    def _counted(self, shape: torch.Size, device: torch.device) -> tuple[Documents | None, Tensor | None]:
        """The documents that tokens of this shape are in, and which of the tokens count."""
        mask, (front, back) = self.mask, self.special_token_counts
        if self.given is not None and self.given < shape[1]:
            mask = torch.ones(shape[0], self.given, dtype=torch.bool) if mask is None else mask
            mask = nn.functional.pad(mask, (0, shape[1] - self.given))
        if mask is not None and mask.shape != shape:
            sizes = f"the batch's mask is {tuple(mask.shape)}, but the tokens are {tuple(shape)}"
            raise ShapeError(f"{sizes}: measure samples of one size without padding, or leave out the mask to count it")
        mask = None if mask is None else mask.to(device)
        if front or back:
            (_, first), _ = next(iter(self._kept), (shape, device))
            if shape[1] <= front + back:
                raise AcutanceError(f"all {shape[1]} tokens of a sample are special: read with prefix='in'")
            if shape[1] > first:  # such as EoMT's queries
                raise AcutanceError(f"a layer has {shape[1]} tokens, the first reading had {first}: use prefix='in'")
            content = torch.ones(shape, dtype=torch.bool, device=device)
            content[:, :front] = content[:, shape[1] - back :] = False
            mask = content if mask is None else mask & content
        if self.documents is None:
            return None, mask
        documents = self.documents.to(device)
        return documents, documents.inside if mask is None else documents.inside & documents.split(mask)

    def record(self, record: AttentionCall) -> AttentionCall:
        """The record with each document as a sample; refuses documents that see each other."""
        if self.documents is None:
            return record
        self.documents.refuse_mixing(record)
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
    """Refuse what is no series of batches; the rows or names of one batch would be read as batches."""
    kind = type(batches).__name__
    if isinstance(batches, (Tensor, Mapping)):
        raise AcutanceError(f"a {kind} in place of batches: write [batch], or pass a DataLoader")
    if isinstance(batches, (str, np.ndarray)):
        fed_of(batches)
    is_iterable = hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")
    if batches is not None and (isinstance(batches, nn.Module) or not is_iterable):
        raise AcutanceError(f"batches are a list or a DataLoader of tensors or mappings, not a {kind}")


def fed_of(batch: Any) -> Fed:
    """What a batch of any accepted form feeds."""
    fed = batch[0] if isinstance(batch, (tuple, list)) and batch and isinstance(batch[0], Tensor) else batch
    flat = arguments_of(fed)
    tensors = [x for one in flat for x in (one if isinstance(one, (tuple, list)) else [one]) if isinstance(x, Tensor)]
    if any(x.is_meta for x in tensors):
        raise AcutanceError("a batch is on the meta device, without values: make it on the CPU")
    is_fed = isinstance(fed, Tensor) or (isinstance(fed, Mapping) and bool(tensors))
    if is_fed and not any(isinstance(x, np.ndarray) for x in flat):
        return fed
    inside = flat[0] if isinstance(fed, Mapping) and flat else fed
    while isinstance(inside, (list, tuple)) and inside:
        inside = inside[0]
    advice = {
        str: "tokenise it first, with tokenizer(texts, return_tensors='pt')",
        int: "make a tensor of the ids, torch.tensor([ids])",
        np.ndarray: "make a tensor of it, torch.from_numpy(array)",
    }
    found = next((kind for kind in advice if any(isinstance(x, kind) for x in (inside, *flat))), None)
    told = f" of {type(inside).__name__}" if inside is not fed else ""
    what = f"a batch must be a tensor, a (tensor, …) tuple or a mapping of tensors, not {type(fed).__name__}{told}"
    raise AcutanceError(what if found is None else f"{what}: {advice[found]}")


def refuse_misfit(model: nn.Module, fed: Fed) -> None:
    """Refuse names that a model does not take, and ids that are none of its tokens."""
    try:
        takes = signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # of compiled code
        return
    names = [one.name for one in takes if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    given = {name: x for name, x in fed.items() if name != SPECIAL} if isinstance(fed, Mapping) else {}
    unknown = [str(name) for name in given if name not in names]
    others = any(one.kind == one.VAR_KEYWORD for one in takes)
    if unknown and names and (not others or len(unknown) == len(given)):
        raise AcutanceError(f"{type(model).__name__} takes no {', '.join(unknown)}: it takes {', '.join(names[:6])}")
    ids = given.get("input_ids") if given else fed if names[:1] == ["input_ids"] else None
    if not isinstance(ids, Tensor):
        return
    if ids.is_floating_point():
        raise AcutanceError(f"input_ids are {ids.dtype}, but they number tokens: pass input_ids.long()")
    if ids.ndim == 1:
        raise ShapeError(f"input_ids {tuple(ids.shape)} have no axis of samples: pass input_ids[None]")
    if ids.numel() == 0 or ids.device.type != "cpu":
        return
    with suppress(AttributeError, NotImplementedError):  # where it is not told which module embeds them
        (low, high), known = map(int, ids.aminmax()), model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        if not 0 <= low <= high < known:
            found = f"input_ids run from {low} to {high}, {type(model).__name__} has tokens 0 to {known - 1}"
            raise AcutanceError(f"{found}: use the model's own tokenizer")


def arguments_of(fed: Any) -> list[Any]:
    """The tensor, or the values in a mapping."""
    return [x for value in fed.values() for x in arguments_of(value)] if isinstance(fed, Mapping) else [fed]


def _padding(batch: Mapping[str, Any], names: Sequence[str], rows: int, *, is_packed: bool) -> Tensor | None:
    """(batch, tokens), False where an argument of one of these names marks padding; None if none is given."""
    for name in names:
        mask, marks_padding = batch.get(name), name.endswith("key_padding_mask")
        if not isinstance(mask, Tensor) or (names is IMAGE_PADDING and bool(mask.all())):
            continue
        if mask.ndim == 2 or (mask.ndim == 1 and marks_padding):  # one axis: a sample by itself
            return torch.atleast_2d(mask).bool() ^ marks_padding  # type: ignore[no-any-return]
        if names is IMAGE_PADDING:
            raise ShapeError(f"{name} is {tuple(mask.shape)}, not (batch, tokens): measure images without padding")
        if mask.ndim > 2 and not marks_padding:
            return _padding_of_pairs(name, mask, rows, is_packed=is_packed)
    return None


def _padding_of_pairs(name: str, mask: Tensor, rows: int, *, is_packed: bool) -> Tensor | None:
    """The padding in a mask (batch, heads, queries, keys), if every query sees the same keys."""
    is_float = mask.is_floating_point()  # added to the logits, or zeros and ones
    is_added = is_float and (bool((mask <= 0).all()) or bool((mask <= HIDDEN).any()))
    visible = mask > HIDDEN if is_added else mask.bool()
    if is_added or not is_float or mask.ndim == 3 or bool((mask == 1).all()):
        keys = visible.any(-2, keepdim=True)
        is_seeing = visible.any(-1, keepdim=True)  # padding may be kept from seeing anything
        one = keys[:, :1] if mask.ndim == 4 else keys
        if bool((keys == one).all()) and bool((visible == keys & is_seeing).all()):
            return one.flatten(1).expand(rows if len(one) == 1 else -1, -1)
        if is_packed:  # it keeps documents apart, which `refuse_mixing` checks
            return None
    raise ShapeError(f"{name} is {tuple(mask.shape)}, not just padding: give {name} as (batch, tokens), 0 for padding")
