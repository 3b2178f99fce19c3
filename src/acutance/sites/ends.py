"""What stands at the ends of a model's content: special tokens around it, the norm after the last block."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor, nn

from acutance.errors import AcutanceError
from acutance.sites.blocks import CONTAINERS, path_of, place_of

# The names of the parameters that such tokens are kept in.
IN_FRONT = (
    *("cls_token", "class_token", "class_embedding", "cls_register_token"),
    *("dist_token", "distillation_token", "reg_token", "register_tokens"),
)
BEHIND = ("detection_tokens",)  # YOLOS
FINAL_NORMS = ("norm", "layernorm", "layer_norm", "final_layernorm", "final_layer_norm", "final_norm", "ln_f")


class SpecialTokens(NamedTuple):
    """How many tokens that are no content stand before and after it."""

    front: int = 0  # class, distillation, registers
    back: int = 0  # detection

    def __str__(self) -> str:
        return f"{self.front} prefix {f'and {self.back} trailing ' if self.back else ''}tokens"


def special_tokens(parameters: Iterable[tuple[str, Tensor]]) -> SpecialTokens:
    """Told by the names of the parameters they are kept in."""
    counts = [(path.rpartition(".")[2], p.shape[-2] if p.ndim > 1 else 1) for path, p in parameters]
    front, back = (sum(count for name, count in counts if name in names) for names in (IN_FRONT, BEHIND))
    return SpecialTokens(front, back)


def norm_by_name(holder: nn.Module, _blocks: str) -> nn.Module | None:
    """The child that is called a final norm; an identity counts, where the norm follows the pooling instead."""
    found = (getattr(holder, name, None) for name in FINAL_NORMS)
    return next((norm for norm in found if isinstance(norm, nn.Module) and not isinstance(norm, CONTAINERS)), None)


def final_norm(
    model: nn.Module, last: nn.Module, choose: Callable[[nn.Module, str], nn.Module | None] = norm_by_name
) -> nn.Module:
    """The norm nearest after the blocks, in the module that holds them or around it.

    Args:
        model: where to look.
        last: the attention of the last block.
        choose: the norm among the children of a module, given the name of the child that holds the blocks.
    """
    path = place_of(model, path_of(model, last)).stage
    while path:
        path, _, blocks = path.rpartition(".")
        norm = choose(model.get_submodule(path), blocks)
        if norm is not None:
            return norm
    raise AcutanceError(
        f"{type(model).__name__} has no norm after its last block, as in Post-LN models, or which one it is is not "
        "clear: read tap='block' instead"
    )
