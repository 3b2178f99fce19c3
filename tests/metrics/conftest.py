"""What the metric tests share."""

import pytest

from acutance.attention import products


@pytest.fixture(params=[None, 2], ids=["one tile", "many tiles"])
def tile_rows(request, monkeypatch):
    """Run with all rows in one tile, and with two rows a tile."""
    if request.param is not None:
        monkeypatch.setattr(products, "CPU_TILE", 1)
        monkeypatch.setattr(products, "FEWEST_ROWS", request.param)
