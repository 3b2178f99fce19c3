"""Sizes of tiles and grids. Triton's own functions for them unwrap their arguments at every call: a launch feels it."""


def power_of_two(size: int) -> int:
    """The least one that is not less."""
    return 1 << (size - 1).bit_length()


def tiles_of(size: int, tile: int) -> int:
    """How many tiles it takes."""
    return -(-size // tile)
