import pytest

from acutance.attention import products


@pytest.fixture(params=["one tile", "several tiles"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with four rows per tile, so that few tokens need several tiles."""
    if request.param == "several tiles":
        monkeypatch.setattr(products, "CPU_TILE", 1)
        monkeypatch.setattr(products, "FEWEST_ROWS", 4)
