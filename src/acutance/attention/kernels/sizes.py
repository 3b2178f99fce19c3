"""Sizes of tiles and grids. Triton's own functions unwrap their arguments at every call, which slows a launch."""


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least this."""
    return 1 << (size - 1).bit_length()


def tiles_of(size: int, tile: int) -> int:
    """The number of tiles that hold this many."""
    return -(-size // tile)
