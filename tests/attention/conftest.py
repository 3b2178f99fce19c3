import pytest

from acutance.attention import products


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows to a tile, so that few tokens already need several."""
    monkeypatch.setattr(products, "CPU_TILE", 1)
    monkeypatch.setattr(products, "FEWEST_ROWS", 4)


@pytest.fixture(params=["one tile", "several tiles"])
def tiles(request: pytest.FixtureRequest) -> None:
    if request.param == "several tiles":
        request.getfixturevalue("small_tiles")
