import pytest

from acutance.attention import products


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows to a tile, so that few tokens already need several."""
    monkeypatch.setattr(products, "CPU_TILE", 1)
    monkeypatch.setattr(products, "FEWEST_ROWS", 4)
