import pytest

from acutance.errors import AcutanceError
from acutance.explain import Spectrum
from acutance.files.atomic import atomic_write, finite
from acutance.measure.monitor import History
from acutance.measure.profile import Profile


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


@pytest.mark.parametrize("load", [Profile.load, Spectrum.load, History.load])
def test_files_that_cannot_be_read_are_errors_of_ours(tmp_path, load) -> None:
    with pytest.raises(AcutanceError, match=r"there is no file .*none\.json"):
        load(tmp_path / "none.json")
    with pytest.raises(FileNotFoundError):  # what it was before
        load(tmp_path / "none.json")
    with pytest.raises(AcutanceError, match="cannot be read: Is a directory"):
        load(tmp_path)


def test_errors_name_the_file_that_was_meant(tmp_path) -> None:
    with pytest.raises(IsADirectoryError) as folder:
        atomic_write(tmp_path, b"")
    assert folder.value.filename == str(tmp_path)
    with pytest.raises(OSError, match="No such file") as nowhere:
        atomic_write("/proc/none.json", b"")
    assert nowhere.value.filename == "/proc/none.json"
