"""What the metric tests share."""

import pytest

from acutance.kernels import tiled


@pytest.fixture(params=[None, 2], ids=["one tile", "many tiles"])
def tile_rows(request, monkeypatch):
    """Run with all rows in one tile, and with two rows a tile."""
    if request.param is not None:
        monkeypatch.setattr(tiled, "CPU_TILE", 1)
        monkeypatch.setattr(tiled, "FEWEST_ROWS", request.param)
