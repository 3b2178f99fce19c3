"""Windows of text hold the text: nothing lost, nothing twice, nothing across files. Images are cut as in training."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from acutance.errors import AcutanceError
from acutance.io import centre_crop, image_batches, inputs, text_batches
from lab.data.tiny_data_sets import picture
from tiny_folders import DECLARATION, tiny_tokenizer

pytest.importorskip("transformers", reason="text is cut by a tokenizer of transformers")
HALF = (0.5, 0.5, 0.5)


def rows(batches) -> list[list[int]]:
    """The windows without padding."""
    pairs = [pair for batch in batches for pair in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    return [ids[mask.bool()].tolist() for ids, mask in pairs]


@pytest.mark.parametrize("tokens", [4, 7, 50])
@pytest.mark.parametrize("special", [True, False])
def test_windows_put_together_are_the_text(tokens: int, special: bool, monkeypatch) -> None:
    tokenizer, edge = tiny_tokenizer(special=special), 1 if special else 0
    found = rows(text_batches(DECLARATION, tokenizer, tokens=tokens, batch=3))
    whole = tokenizer(DECLARATION.read_text(), add_special_tokens=False)["input_ids"]
    content = [token for row in found for token in row[edge : len(row) - edge]]
    assert content == whole[: len(content)]
    assert len(whole) - len(content) < 2, "at most one token is left over, which makes no window"
    assert {len(row) for row in found[:-1]} == {tokens}
    assert not special or {(row[0], row[-1]) for row in found} == {(2, 3)}
    monkeypatch.setattr(inputs, "PIECE", 100)  # large files are read in pieces
    assert rows(text_batches(DECLARATION, tokenizer, tokens=tokens)) == found


def test_masks_tell_padding_and_special_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("We hold these truths to be")
    (tmp_path / "b.txt").write_text("We hold")
    tokenizer = tiny_tokenizer()
    (batch,) = text_batches(tmp_path, tokenizer, tokens=20, batch=2)
    assert batch["attention_mask"].tolist() == [[1] * 8, [1, 1, 1, 1, 0, 0, 0, 0]]
    assert batch["special_tokens_mask"].tolist() == [[1, 0, 0, 0, 0, 0, 0, 1], [1, 0, 0, 1, 1, 1, 1, 1]]
    assert batch["input_ids"][1, 4:].tolist() == [tokenizer.pad_token_id] * 4
    assert all(value.dtype == torch.int64 for value in batch.values())


def test_a_folder_is_read_file_by_file_in_the_order_of_paths(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name, words in {"b.txt": "We hold these", "sub/a.txt": "truths to be", "notes.md": "He has refused"}.items():
        (tmp_path / name).write_text(words)
    tokenizer = tiny_tokenizer()
    found = rows(text_batches(tmp_path, tokenizer, tokens=64))
    assert found == [tokenizer(words)["input_ids"] for words in ("We hold these", "truths to be")]


def test_batches_are_counted_read_again_and_limited(tmp_path: Path, monkeypatch) -> None:
    tokenizer = tiny_tokenizer()
    batches = text_batches(DECLARATION, tokenizer, tokens=10, batch=16)
    assert len(batches) == len(list(batches)) > 2
    whole = rows(batches)
    assert (rows(batches), rows(batches[1:3])) == (whole, whole[16:48])
    assert torch.equal(batches[-1]["input_ids"], list(batches)[-1]["input_ids"])
    with pytest.raises(IndexError):
        batches[len(batches)]
    monkeypatch.setattr(inputs, "PIECE", 100)
    damaged = tmp_path / "end.txt"  # a limit reads no further than it needs
    damaged.write_bytes(DECLARATION.read_bytes() * 5 + b"\xff\xff")
    few = text_batches(damaged, tokenizer, tokens=10, batch=4, limit=6)
    assert (len(few), rows(few), few.description) == (2, whole[:6], "6 windows of 10 tokens from end.txt")


def test_a_decoder_reads_the_same_text_shifted() -> None:
    batch = text_batches(DECLARATION, tiny_tokenizer(), tokens=10, decoder_start=7)[0]
    assert batch["decoder_input_ids"][:, 0].tolist() == [7] * 8
    assert torch.equal(batch["decoder_input_ids"][:, 1:], batch["input_ids"][:, :-1])
    assert torch.equal(batch["decoder_attention_mask"], batch["attention_mask"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("nowhere", None, "there is no file or folder .*nowhere"),
        ("blank.txt", b" \n\n", "blank.txt holds no text"),
        ("image.txt", b"\x89PNG\xff", "image.txt cannot be read as UTF-8 text"),
        (".", None, r"no file to read in .*looked for \.txt"),
    ],
)
def test_text_that_is_not_there_is_said_by_name(name, content, message, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(AcutanceError, match=message):
        text_batches(tmp_path / name, tiny_tokenizer(), tokens=10)
    with pytest.raises(AcutanceError, match=r"hold 1 of text beside 2 special tokens.*--tokens 4 or more"):
        text_batches(DECLARATION, tiny_tokenizer(), tokens=3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i, name in enumerate(["b/1.png", "b/2.PNG", "a.png", "c/d/e.bmp"]):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        picture(40, 30, i).save(tmp_path / name, format="bmp" if name.endswith("bmp") else "png")
    (tmp_path / "notes.txt").write_text("no image")
    return tmp_path


def test_images_come_in_the_order_of_their_paths_and_may_come_again(folder: Path) -> None:
    prepare = centre_crop((8, 8), HALF, HALF)
    batches = image_batches(folder, prepare, batch=3)
    expected = prepare([picture(40, 30, i) for i in (2, 0, 1, 3)])
    for _ in range(2):
        assert torch.equal(torch.cat(list(batches)), expected)
    assert (len(batches), batches.description) == (2, f"4 images from {folder.name}")
    assert torch.equal(torch.cat(list(image_batches(folder, prepare, batch=1, limit=2))), expected[:2])
    assert image_batches(folder, prepare, dtype=torch.float64)[0].dtype == torch.float64
    made = {"pixels": torch.zeros(4, 3), "labels": torch.zeros(4, dtype=torch.int64)}  # integers stay what they are
    batch = image_batches(folder, lambda images: made, dtype=torch.bfloat16)[0]
    assert (batch["pixels"].dtype, batch["labels"].dtype) == (torch.bfloat16, torch.int64)


@pytest.mark.parametrize(("size", "left", "top"), [((16, 16), 0, 0), ((20, 16), 2, 0), ((16, 24), 0, 4)])
def test_the_middle_is_kept_and_normalised(size: tuple[int, int], left: int, top: int) -> None:
    image, mean, std = picture(*size, 0), (0.4, 0.5, 0.6), (0.2, 0.3, 0.1)
    (found,) = centre_crop((16, 16), mean, std)([image])
    pixels = np.asarray(image, dtype=np.float64)[top : top + 16, left : left + 16] / 255
    np.testing.assert_allclose(found.numpy(), ((pixels - mean) / std).transpose(2, 0, 1), atol=1e-5)
    assert centre_crop((8, 8), (0.5,), (0.5,))([image, image]).shape == (2, 1, 8, 8), "one channel is grey"
    assert centre_crop((8, 8), HALF, HALF)([Image.new("RGB", (500, 1))]).shape == (1, 3, 8, 8)


def test_images_that_are_not_there_are_said_by_name(folder: Path, tmp_path: Path) -> None:
    prepare = centre_crop((8, 8), HALF, HALF)
    (tmp_path / "empty").mkdir()
    with pytest.raises(AcutanceError, match=r"no file to read in .*empty or its subfolders; looked for \.bmp"):
        image_batches(tmp_path / "empty", prepare)
    damaged = folder / "damaged.jpg"
    damaged.write_bytes((folder / "a.png").read_bytes()[:100])
    for lost in (None, folder / "gone.jpg", damaged):  # a link to nothing, and one to itself
        if lost is not None:
            damaged.unlink()
            damaged.symlink_to(lost)
        with pytest.raises(AcutanceError, match=r"damaged\.jpg cannot be read as an image"):
            list(image_batches(folder, prepare))
