"""Files that changed since they were written are found and named."""

import json
from pathlib import Path

import pytest

from acrlpd.checksums import (
    ChecksumError,
    directory_problems,
    read_checksums,
    read_json_with_checksum,
    read_with_checksum,
    verified,
    write_checksums,
    write_json_with_checksum,
    write_with_checksum,
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "d").mkdir()
    for i in range(20):
        (tmp_path / "d" / str(i)).write_bytes(bytes([i]) * (200_000 * (i % 10) + i))  # small and large files
    (tmp_path / "empty").touch()
    write_checksums(tmp_path)
    return tmp_path


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_every_file_has_a_checksum_and_is_intact(directory: Path) -> None:
    assert set(read_checksums(directory)) == {directory / "empty", *(directory / "d" / str(i) for i in range(20))}
    write_checksums(directory)  # the file of checksums does not name itself
    with verified(directory):
        pass


@pytest.mark.parametrize(("name", "is_read"), [("13", False), ("18", True)])
def test_one_flipped_bit_names_the_file(directory: Path, name: str, is_read: bool) -> None:
    """Small files are checked before anything is read, large files at the same time."""
    flip_bit(directory / "d" / name)
    has_been_read = False
    with pytest.raises(ChecksumError) as error, verified(directory):
        has_been_read = True
    assert has_been_read == is_read
    [problem, fix] = str(error.value).splitlines()
    assert problem.startswith(f"{directory}/d/{name} has changed since it was written: expected the XXH3-128 ")
    assert "Copy the directory again" in fix


def test_a_damaged_file_explains_why_reading_failed(directory: Path) -> None:
    """The error of the reader does not name the file; the error of the checksum does."""
    with pytest.raises(KeyError, match="a bug"), verified(directory):
        raise KeyError("a bug")
    flip_bit(directory / "d" / "18")
    with pytest.raises(ChecksumError, match="d/18 has changed") as error, verified(directory):
        raise RuntimeError("Error opening zarr driver")
    assert isinstance(error.value.__cause__, RuntimeError)


def test_missing_and_cut_files_are_found_before_anything_is_read(directory: Path) -> None:
    (directory / "d" / "7").unlink()
    cut = directory / "d" / "18"
    cut.write_bytes(cut.read_bytes()[:-1])
    with pytest.raises(ChecksumError) as error, verified(directory):
        raise AssertionError("the files were read")
    found = str(error.value)
    assert "d/7 is missing; expected a file of 1400007 bytes" in found
    assert "d/18 has changed since it was written: expected 1600018 bytes, found 1600017" in found


def test_many_damaged_files_are_counted(directory: Path) -> None:
    for i in range(1, 20):
        flip_bit(directory / "d" / str(i))
    with pytest.raises(ChecksumError, match=r"\.\.\. and 6 more files"), verified(directory):
        pass


def test_several_processes_check_every_file_once(directory: Path) -> None:
    flip_bit(directory / "d" / "7")
    found = 0
    for process in range(3):
        try:
            with verified(directory, share=(process, 3)):
                pass
        except ChecksumError:
            found += 1
    assert found == 1


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "is missing"), ("{", "is damaged"), ("[]", "is damaged"), ('{"a": 1}', "is damaged")],
)
def test_checksums_that_cannot_be_read(directory: Path, content: str | None, problem: str) -> None:
    file = directory / "checksums.json"
    file.unlink()
    if content is not None:
        file.write_text(content)
    with pytest.raises(ChecksumError, match=rf"checksums\.json .*{problem}"):
        read_checksums(directory)


def test_only_named_files_are_covered(directory: Path) -> None:
    """The README of an export may be changed."""
    write_checksums(directory, [directory / "empty"])
    assert list(read_checksums(directory)) == [directory / "empty"]


def test_a_file_without_a_checksum_is_refused(directory: Path) -> None:
    """Otherwise a file of checksums that lost its entries would let every damage pass."""
    path = directory / "checksums.json"
    content = json.loads(path.read_text())
    del content["d/18"]
    for text in (json.dumps(content), "{}"):
        path.write_text(text)
        with pytest.raises(ChecksumError, match=r"d/\d+ has no checksum in .*/checksums\.json"), verified(directory):
            pytest.fail("was read")
        assert any("d/18 has no checksum" in problem for problem in directory_problems(directory))


def test_a_size_that_is_no_number_is_damage(directory: Path) -> None:
    (directory / "checksums.json").write_text('{"empty": [Infinity, ""]}')
    with pytest.raises(ChecksumError, match="is damaged: OverflowError"):
        read_checksums(directory)


def test_checked_files_are_read_as_they_were_written(tmp_path: Path) -> None:
    for content in (b"", b"x", bytes(range(256)) * 5):
        write_with_checksum(tmp_path / "file", content)
        assert read_with_checksum(tmp_path / "file") == content
    write_json_with_checksum(tmp_path / "json", entry := {"a": [1, 2.5, None], "b": {"c": "ü"}})
    assert read_json_with_checksum(tmp_path / "json") == entry
    assert json.loads((tmp_path / "json").read_text()).items() > entry.items()  # other programs read it, too


@pytest.mark.parametrize("content", [b"", b"short", b"{}", b"x" * 60])
def test_files_without_a_checksum_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    for read in (read_with_checksum, read_json_with_checksum):
        with pytest.raises(ValueError, match="do not match the checksum"):
            read(tmp_path / "file")
