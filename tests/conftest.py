import pytest


@pytest.fixture(params=["one tile", "several tiles"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with four rows per tile, so that few tokens need several tiles."""
    if request.param == "several tiles":
        for name, value in {"CPU_TILE": 1, "FEWEST_ROWS": 4}.items():
            monkeypatch.setattr(f"acutance.attention.products.{name}", value)
