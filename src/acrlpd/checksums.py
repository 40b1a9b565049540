"""Checksums of files: written with the files or beside the files, and checked when the files are read.

A checksum finds bytes that changed by accident, on a disk or in a copy. A small file holds its own checksum. The file
checksums.json of a directory names the files below the directory with their sizes and their XXH3-128, which is computed
as fast as memory is read.
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from acrlpd.cores import usable_cores
from acrlpd.files import write_atomically, write_text_atomically

CHECKSUMS_FILE = "checksums.json"
# Orbax marks a complete directory with the second file after the checksums were written. The mark holds no data.
_WITHOUT_CHECKSUM = (CHECKSUMS_FILE, "commit_success.txt")
# Files up to this size are checked before others are read: they take no time, and tell how to read the others.
_SMALL_BYTES = 2**20
_BUFFER_BYTES = 2**20  # fits into the cache of a core; each read costs a system call and Python's lock
_NUM_THREADS = min(8, usable_cores())
_DIGEST_BYTES = 16  # of an XXH3-128
_DAMAGED = "the bytes of the file do not match the checksum that was written with them"
_FIX = "Copy the directory again from a place where it is intact, or use an earlier checkpoint"


class ChecksumError(ValueError):
    """Files are missing or have changed since they were written; the message names the files."""


def checksum(content: bytes) -> str:
    """The XXH3-128 of bytes, in hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(content)


def short_checksum(content: bytes | memoryview) -> int:
    """The XXH3-64 of bytes as a number, for the frames of a file, of which each has a checksum."""
    return xxhash.xxh3_64_intdigest(content)


def write_with_checksum(path: Path, content: bytes) -> None:
    """Writes the content and, behind it, its checksum. Other programs read a zip file all the same."""
    write_atomically(path, lambda file: file.write(content + xxhash.xxh3_128_digest(content)))


def read_with_checksum(path: Path) -> bytes:
    """The content that `write_with_checksum` wrote; raises ValueError if a byte of the file has changed."""
    data = path.read_bytes()
    content, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if digest != xxhash.xxh3_128_digest(content):
        raise ValueError(_DAMAGED)
    return content


def is_intact(path: Path) -> bool:
    """Whether a file is as `write_with_checksum` wrote it."""
    try:
        read_with_checksum(path)
    except ValueError:
        return False
    return True


def stored_checksum(path: Path) -> str:
    """The checksum that `write_with_checksum` put behind the content, which is not read; in hexadecimal digits."""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - _DIGEST_BYTES, 0))
        return file.read().hex()


def write_json_with_checksum(path: Path, content: Mapping[str, Any]) -> None:
    """Writes an object whose first key is the checksum of all the text behind this key."""
    text = json.dumps(content, indent=1).removeprefix("{")
    write_text_atomically(path, _checksum_key(text.encode()) + text)


def read_json_with_checksum(path: Path) -> dict[str, Any]:
    """The object that `write_json_with_checksum` wrote; raises ValueError if a byte of the file has changed."""
    data = path.read_bytes()
    text = data[len(_checksum_key(b"")) :]
    if data != _checksum_key(text).encode() + text:
        raise ValueError(_DAMAGED)
    content: dict[str, Any] = json.loads(data)
    del content["checksum"]
    return content


def _checksum_key(text: bytes) -> str:
    return f'{{"checksum": "{checksum(text)}",'


def file_checksum(path: Path) -> str:
    """The XXH3-128 of a file, in hexadecimal digits."""
    hasher, buffer = xxhash.xxh3_128(), memoryview(bytearray(_BUFFER_BYTES))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            hasher.update(buffer[:size])
    return hasher.hexdigest()


class Recorded(NamedTuple):
    """What checksums.json says about a file."""

    size: int  # bytes
    checksum: str


def write_checksums(directory: Path, files: Iterable[Path] | None = None) -> None:
    """Writes the checksums of `files`, by default of every file below the directory."""
    files = sorted(_files(directory) if files is None else files)
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        checksums = pool.map(file_checksum, files)
        content = {
            path.relative_to(directory).as_posix(): Recorded(path.stat().st_size, checksum)
            for path, checksum in zip(files, checksums, strict=True)
        }
    (directory / CHECKSUMS_FILE).write_text(json.dumps(content, indent=1) + "\n")


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in directory.rglob("*") if path.name not in _WITHOUT_CHECKSUM and path.is_file())


def read_checksums(directory: Path) -> dict[Path, Recorded]:
    """What the checksums.json of a directory says about the files below the directory."""
    path = directory / CHECKSUMS_FILE
    try:
        content = json.loads(path.read_text())
        return {directory / name: Recorded(int(size), str(checksum)) for name, (size, checksum) in content.items()}
    except FileNotFoundError:
        raise ChecksumError(f"{path} is missing, so the files of the directory cannot be checked. {_FIX}") from None
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise ChecksumError(f"{path} is damaged: {type(error).__name__}: {error}. {_FIX}") from error


def file_problem(path: Path, recorded: Recorded, *, only_size: bool = False) -> str | None:
    """How a file differs from what was written; None if the file is the same."""
    try:
        size = path.stat().st_size
        found = recorded.checksum if only_size or size != recorded.size else file_checksum(path)
    except FileNotFoundError:
        return f"{path} is missing; expected a file of {recorded.size} bytes"
    except OSError as error:
        return f"{path} cannot be read: {error}"
    if size != recorded.size:
        return f"{path} has changed since it was written: expected {recorded.size} bytes, found {size}"
    if found != recorded.checksum:
        return f"{path} has changed since it was written: expected the XXH3-128 {recorded.checksum}, found {found}"
    return None


def _unknown_files(directory: Path, recorded: Mapping[Path, Recorded]) -> list[str]:
    """What is wrong with files that have no checksum: a reader of the directory would read them unchecked."""
    return [
        f"{path} has no checksum in {directory / CHECKSUMS_FILE}: the file was added later (remove it), or the "
        "checksums have changed"
        for path in sorted(set(_files(directory)) - recorded.keys())
    ]


def directory_problems(
    directory: Path, advance: Callable[[int], object] = lambda _: None, *, only_recorded: bool = False
) -> Iterator[str]:
    """What is wrong with the files of a directory; `advance` is called with the bytes that have been checked.

    With `only_recorded` the directory may have other files, which have no checksum.
    """
    try:
        files = read_checksums(directory)
    except ChecksumError as error:
        yield str(error)
        return
    if not only_recorded:
        yield from _unknown_files(directory, files)
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        results = pool.map(file_problem, files.keys(), files.values())
        for recorded, problem in zip(files.values(), results, strict=True):
            advance(recorded.size)
            if problem is not None:
                yield problem


@contextlib.contextmanager
def verified(*directories: Path, share: tuple[int, int] = (0, 1)) -> Iterator[None]:
    """Checks the files of directories, the large files in threads while the body of the `with` statement reads them.

    Raises `ChecksumError` if a file is damaged: before the body where a small file or the size of a file shows the
    damage, otherwise at the end of the body. An error of the body is replaced, because the damaged file is its likely
    reason. Of several processes that read the same files, process i of n checks its `share` (i, n).
    """
    first, step = share
    recorded = {directory: read_checksums(directory) for directory in directories}
    _refuse([problem for directory, files in recorded.items() for problem in _unknown_files(directory, files)])
    files = [entry for files in recorded.values() for entry in files.items()][first::step]
    large = [(path, recorded) for path, recorded in files if recorded.size > _SMALL_BYTES]
    large.sort(key=lambda entry: entry[1].size, reverse=True)  # The body waits for the last check.
    _refuse([file_problem(path, recorded, only_size=recorded.size > _SMALL_BYTES) for path, recorded in files])
    pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="acrlpd-checksums")
    try:
        checks = [pool.submit(file_problem, path, recorded) for path, recorded in large]
        try:
            yield
        except Exception as error:
            _refuse([check.result() for check in checks], error)
            raise
        _refuse([check.result() for check in checks])
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _refuse(results: Sequence[str | None], cause: Exception | None = None) -> None:
    if problems := [problem for problem in results if problem is not None]:
        more = f"\n... and {len(problems) - 5} more files" if len(problems) > 5 else ""
        raise ChecksumError("\n".join(problems[:5]) + f"{more}\n{_FIX}") from cause
