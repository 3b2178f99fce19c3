import pytest

from acutance.kernels import tiled


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows to a tile, so that few tokens already need several."""
    monkeypatch.setattr(tiled, "CPU_TILE", 1)
    monkeypatch.setattr(tiled, "FEWEST_ROWS", 4)
