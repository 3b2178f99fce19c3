import pytest
from measured_vit import small_images, small_vit


@pytest.fixture
def model():
    return small_vit(registers=1, drop_path=0.5)


@pytest.fixture
def images():
    return small_images()
