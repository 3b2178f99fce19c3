import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_data_sets import write_cifar10, write_cifar100

from acutance.errors import AcutanceError
from acutance.lab.data import load_images
from acutance.lab.data.pickles import load_plain


class Malicious:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_arrays_and_plain_values_come_through_every_protocol(protocol: int) -> None:
    content = {b"data": np.arange(12, dtype=np.uint8).reshape(3, 4), b"labels": [1, 2, 3], b"name": b"\x00\xff"}
    loaded = load_plain(pickle.dumps(content, protocol))
    assert np.array_equal(loaded[b"data"], content[b"data"])
    assert loaded[b"data"].dtype == np.uint8
    assert (loaded[b"labels"], loaded[b"name"]) == ([1, 2, 3], b"\x00\xff")


def test_pickles_of_old_numpy_are_read() -> None:
    new = pickle.dumps(np.arange(3, dtype=np.uint8), 2)
    assert b"numpy._core" in new or b"numpy.core" in new
    assert load_plain(new.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")).tolist() == [0, 1, 2]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_code_is_refused_and_not_run(protocol: int, tmp_path: Path) -> None:
    target = tmp_path / "made_by_the_pickle"
    with pytest.raises(pickle.UnpicklingError, match="mkdir"):
        load_plain(pickle.dumps({b"data": Malicious(target)}, protocol))
    assert not target.exists()


@pytest.mark.parametrize(
    "content",
    [b"cbuiltins\neval\n(S'1'\ntR.", b"cnumpy\nload\n(S'x'\ntR.", b"c_codecs\nencode\n(Vx\nVrot13\ntR.", b"", b"junk"],
)
def test_other_names_and_junk_are_refused(content: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError):
        load_plain(content)


@pytest.mark.parametrize(
    ("name", "write", "file"),
    [
        ("cifar10", write_cifar10, "data_batch_3"),
        ("cifar100", write_cifar100, "train"),
        ("cifar100", write_cifar100, "meta"),
    ],
)
def test_a_malicious_cifar_file_is_one_clear_line(name: str, write: Any, file: str, tmp_path: Path) -> None:
    folder = write(tmp_path)
    target = tmp_path / "made_by_the_pickle"
    (folder / file).write_bytes(pickle.dumps({b"data": Malicious(target)}))
    with pytest.raises(AcutanceError, match=r"mkdir.*it was not run.*Get https://") as caught:
        load_images(name, tmp_path, "train")
    assert str(folder / file) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not target.exists()
