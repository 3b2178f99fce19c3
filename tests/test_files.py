import pytest

from acutance.files import atomic_write, finite


def test_writes_bytes_and_makes_folders(tmp_path) -> None:
    path = atomic_write(tmp_path / "a" / "b.txt", b"hello")
    assert path.read_bytes() == b"hello"


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError])
def test_an_interruption_keeps_the_old_file_and_leaves_nothing_else(tmp_path, interruption) -> None:
    path = atomic_write(tmp_path / "b.txt", b"old")

    def half(temporary) -> None:
        temporary.write_bytes(b"ne")
        raise interruption

    with pytest.raises(interruption):
        atomic_write(path, half)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["b.txt"]


def test_nan_becomes_null_wherever_it_stands() -> None:
    found = finite({"a": float("nan"), "b": [1.5, {"c": float("nan")}], "d": "nan"})
    assert found == {"a": None, "b": [1.5, {"c": None}], "d": "nan"}
