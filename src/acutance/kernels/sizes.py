"""Sizes of tiles and grids. Triton's own functions for them take the host some 10 µs a call, a third of a launch."""


def power_of_two(size: int) -> int:
    """The least one that is not less."""
    return 1 << (size - 1).bit_length()


def tiles_of(size: int, tile: int) -> int:
    """How many tiles it takes."""
    return -(-size // tile)
