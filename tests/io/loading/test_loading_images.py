"""Folders of images, prepared as models were trained to see them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from acutance.errors import AcutanceError
from acutance.io import image_batches
from acutance.io.inputs import centre_crop

HALF = (0.5, 0.5, 0.5)


def picture(seed: int = 0, size: tuple[int, int] = (40, 30)) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*reversed(size), 3), dtype=np.uint8))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i, name in enumerate(["b/1.png", "b/2.PNG", "a.png", "c/d/e.bmp"]):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        picture(i).save(tmp_path / name, format="bmp" if name.endswith("bmp") else "png")
    (tmp_path / "notes.txt").write_text("no image")
    return tmp_path


def test_images_come_in_the_order_of_their_paths_and_may_come_again(folder: Path) -> None:
    prepare = centre_crop((8, 8), HALF, HALF)
    batches = image_batches(folder, prepare, batch=3)
    expected = prepare([picture(i) for i in (2, 0, 1, 3)])
    for _ in range(2):
        assert torch.equal(torch.cat(list(batches)), expected)
    assert (len(batches), batches.description) == (2, f"4 images from {folder.name}")
    assert torch.equal(torch.cat(list(image_batches(folder, prepare, batch=1, limit=2))), expected[:2])
    assert image_batches(folder, prepare, dtype=torch.float64)[0].dtype == torch.float64


def test_tensors_of_a_mapping_take_the_dtype_but_integers_stay(folder: Path) -> None:
    def prepare(images):
        return {"pixel_values": torch.zeros(len(images), 3), "labels": torch.zeros(len(images), dtype=torch.int64)}

    batch = image_batches(folder, prepare, dtype=torch.bfloat16)[0]
    assert {name: value.dtype for name, value in batch.items()} == {
        "pixel_values": torch.bfloat16,
        "labels": torch.int64,
    }


def test_a_crop_of_the_whole_only_normalises() -> None:
    """Resizing to its own size is the identity, so the oracle is arithmetic alone."""
    image, mean, std = picture(size=(16, 16)), (0.4, 0.5, 0.6), (0.2, 0.3, 0.1)
    (found,) = centre_crop((16, 16), mean, std)([image])
    pixels = np.asarray(image, dtype=np.float64) / 255
    expected = ((pixels - mean) / std).transpose(2, 0, 1)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize(("size", "left", "top"), [((20, 16), 2, 0), ((16, 24), 0, 4)])
def test_the_middle_is_kept(size: tuple[int, int], left: int, top: int) -> None:
    image = picture(size=size)
    (found,) = centre_crop((16, 16), (0,) * 3, (1,) * 3)([image])
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
    torch.testing.assert_close(found, pixels[:, top : top + 16, left : left + 16])


def test_squashing_is_what_the_vit_processor_does() -> None:
    transformers = pytest.importorskip("transformers.models.vit.image_processing_pil_vit")
    processor = transformers.ViTImageProcessorPil(size={"height": 24, "width": 24})
    expected = processor([picture()], return_tensors="pt")["pixel_values"]
    found = centre_crop((24, 24), HALF, HALF, interpolation="bilinear", mode="squash")([picture()])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_grey_images_for_one_channel() -> None:
    found = centre_crop((8, 8), (0.5,), (0.5,))([picture(), picture(1)])
    assert found.shape == (2, 1, 8, 8)


def test_images_that_are_not_there_are_said_by_name(folder: Path, tmp_path: Path) -> None:
    prepare = centre_crop((8, 8), HALF, HALF)
    with pytest.raises(AcutanceError, match=r"there is no file or folder .*nowhere"):
        image_batches(tmp_path / "nowhere", prepare)
    (tmp_path / "empty").mkdir()
    with pytest.raises(AcutanceError, match=r"no file to read in .*empty or its subfolders; looked for \.bmp"):
        image_batches(tmp_path / "empty", prepare)
    (folder / "damaged.jpg").write_bytes((folder / "a.png").read_bytes()[:100])
    with pytest.raises(AcutanceError, match=r"damaged\.jpg cannot be read as an image"):
        list(image_batches(folder, prepare))
