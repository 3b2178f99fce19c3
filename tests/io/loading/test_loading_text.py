"""Windows of text hold the text: nothing lost, nothing twice, nothing across files."""

from pathlib import Path

import pytest
import torch
from tiny_folders import DECLARATION, tiny_tokenizer

import acutance.io.inputs as text_room
from acutance.errors import AcutanceError
from acutance.io import text_batches

pytest.importorskip("transformers", reason="text is cut by a tokenizer of transformers")


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def rows(batches) -> list[list[int]]:
    """The windows without padding."""
    return [
        ids[mask.bool()].tolist()
        for batch in batches
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]


@pytest.mark.parametrize("tokens", [4, 7, 50])
@pytest.mark.parametrize("special", [True, False])
def test_windows_put_together_are_the_text(tokens: int, special: bool) -> None:
    tokenizer = tiny_tokenizer(special=special)
    found = rows(text_batches(DECLARATION, tokenizer, tokens=tokens, batch=3))
    edge = 1 if special else 0
    whole = tokenizer(DECLARATION.read_text(), add_special_tokens=False)["input_ids"]
    content = [token for row in found for token in row[edge : len(row) - edge]]
    assert content == whole[: len(content)]
    assert len(whole) - len(content) < 2, "at most one token is left over, which makes no window"
    assert {len(row) for row in found[:-1]} == {tokens}
    if special:
        assert {(row[0], row[-1]) for row in found} == {(2, 3)}


def test_masks_tell_padding_and_special_tokens(tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("We hold these truths to be")
    (tmp_path / "b.txt").write_text("We hold")
    (batch,) = text_batches(tmp_path, tokenizer, tokens=20, batch=2)
    assert batch["attention_mask"].tolist() == [[1] * 8, [1, 1, 1, 1, 0, 0, 0, 0]]
    assert batch["special_tokens_mask"].tolist() == [[1, 0, 0, 0, 0, 0, 0, 1], [1, 0, 0, 1, 1, 1, 1, 1]]
    assert batch["input_ids"][1, 4:].tolist() == [tokenizer.pad_token_id] * 4
    assert all(value.dtype == torch.int64 for value in batch.values())


def test_a_folder_is_read_file_by_file_in_the_order_of_paths(tokenizer, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name, words in {"b.txt": "We hold these", "sub/a.txt": "truths to be", "notes.md": "He has refused"}.items():
        (tmp_path / name).write_text(words)
    found = rows(text_batches(tmp_path, tokenizer, tokens=64))
    expected = [tokenizer(words)["input_ids"] for words in ("We hold these", "truths to be")]
    assert found == expected


def test_large_files_are_cut_alike_in_pieces(tokenizer, monkeypatch) -> None:
    whole = rows(text_batches(DECLARATION, tokenizer, tokens=30))
    monkeypatch.setattr(text_room, "PIECE", 100)
    assert rows(text_batches(DECLARATION, tokenizer, tokens=30)) == whole


def test_a_limit_keeps_the_first_windows_and_reads_no_further(tokenizer, tmp_path: Path, monkeypatch) -> None:
    whole = rows(text_batches(DECLARATION, tokenizer, tokens=10))
    monkeypatch.setattr(text_room, "PIECE", 100)
    damaged = tmp_path / "end.txt"
    damaged.write_bytes(DECLARATION.read_bytes() * 5 + b"\xff\xff")
    batches = text_batches(damaged, tokenizer, tokens=10, batch=4, limit=6)
    assert (len(batches), rows(batches)) == (2, whole[:6])
    assert batches.description == "6 windows of 10 tokens from end.txt"


def test_batches_can_be_read_again_and_one_by_one(tokenizer) -> None:
    batches = text_batches(DECLARATION, tokenizer, tokens=10, batch=16)
    assert len(batches) == len(list(batches)) > 2
    assert rows(batches) == rows(batches)
    assert torch.equal(batches[-1]["input_ids"], list(batches)[-1]["input_ids"])
    assert rows(batches[1:3]) == rows(batches)[16:48]
    with pytest.raises(IndexError):
        batches[len(batches)]


def test_a_decoder_reads_the_same_text_shifted(tokenizer) -> None:
    batch = text_batches(DECLARATION, tokenizer, tokens=10, decoder_start=7)[0]
    assert batch["decoder_input_ids"][:, 0].tolist() == [7] * 8
    assert torch.equal(batch["decoder_input_ids"][:, 1:], batch["input_ids"][:, :-1])
    assert torch.equal(batch["decoder_attention_mask"], batch["attention_mask"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("nowhere", None, "there is no file or folder .*nowhere"),
        ("empty.txt", b"", "empty.txt holds no text"),
        ("blank.txt", b" \n\n", "blank.txt holds no text"),
        ("image.txt", b"\x89PNG\xff", "image.txt cannot be read as UTF-8 text"),
        (".", None, r"no file to read in .*looked for \.txt"),
    ],
)
def test_text_that_is_not_there_is_said_by_name(name, content, message, tokenizer, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(AcutanceError, match=message):
        text_batches(tmp_path / name, tokenizer, tokens=10)


def test_a_window_must_have_room_for_text(tokenizer) -> None:
    for tokens, room in ((1, 0), (3, 1)):
        words = (
            f"windows of {tokens} tokens hold {room} of text beside 2 special tokens, and 2 are .*--tokens 4 or more"
        )
        with pytest.raises(AcutanceError, match=words):
            text_batches(DECLARATION, tokenizer, tokens=tokens)
    assert len(text_batches(DECLARATION, tokenizer, tokens=4, limit=3)[0]["input_ids"]) == 3
