"""Flips bits in the test datasets and counts which flips `acrlpd data validate` finds, format by format.

python tests/data/flipped_bits.py 200     # the table of docs/data.md: 200 flips for each format
"""

import dataclasses
import shutil
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np
import pyarrow.parquet as pq

from acrlpd.data.sources.source import DatasetError, EpisodeSource, open_source
from acrlpd.data.tools.inspect import Frames, validate_source

ARCHIVES = Path(__file__).parents[1] / "datasets"
PARQUET = "data/chunk-000/episode_000003.parquet"


def add_page_checksums(path: Path) -> None:
    pq.write_table(pq.read_table(path), path, write_page_checksum=True)


def add_fletcher32(path: Path) -> None:
    """Writes an HDF5 file again with a checksum for each chunk of data."""
    old = path.rename(path.with_suffix(".old"))
    with h5py.File(old) as source, h5py.File(path, "w") as target:

        def copy(name: str, item: h5py.Dataset | h5py.Group) -> None:
            if isinstance(item, h5py.Dataset):
                target.create_dataset(name, data=item[()], chunks=item.chunks or True, fletcher32=True)

        source.visititems(copy)
        target.attrs.update(source.attrs)
    old.unlink()


@dataclasses.dataclass(frozen=True)
class Case:
    """A file of a dataset in which bits are flipped, and the episode that the file holds."""

    dataset: str
    file: str
    episode: int
    prepare: Callable[[Path], None] = lambda path: None


CASES = {
    "parquet, as lerobot writes it": Case("aloha_v21", PARQUET, 3),
    "parquet with page checksums": Case("aloha_v21", PARQUET, 3, add_page_checksums),
    "PNG frames in parquet": Case("libero_v21", "data/chunk-000/episode_000002.parquet", 2),
    "MP4, AV1": Case("aloha_v21", "videos/chunk-000/observation.images.cam_high/episode_000003.mp4", 3),
    "MP4, H.264": Case("droid_like", "success/**/12345678.mp4", 0),
    "HDF5, JPEG frames": Case("aloha_hdf5_compressed", "episode_0.hdf5", 0),
    "HDF5, raw frames": Case("aloha_hdf5_sim_raw", "episode_0.hdf5", 0),
    "HDF5 with fletcher32": Case("aloha_hdf5_sim_raw", "episode_0.hdf5", 0, add_fletcher32),
}


@dataclasses.dataclass(frozen=True)
class Found:
    """How many flips were made, and what became of them."""

    flips: int
    harmless: int  # everything that is read is the same to the last bit
    default: int  # of the others: found by `acrlpd data validate`
    all_frames: int  # found by `acrlpd data validate --frames all`

    @property
    def harmful(self) -> int:
        return self.flips - self.harmless


def content(source: EpisodeSource, episode: int) -> int:
    """A checksum of everything that is read of an episode."""
    found = source.episode(source.indices.index(episode))
    digest = zlib.crc32(repr((found.prompt, sorted(found.columns))).encode())
    for name in sorted(found.columns):
        digest = zlib.crc32(np.ascontiguousarray(found.columns[name]).tobytes(), digest)
    for camera in source.cameras:
        digest = zlib.crc32(found.frames(camera, np.arange(found.length)).tobytes(), digest)
    return digest


def validates(root: Path, episode: int, frames: Frames) -> bool:
    try:
        source = open_source(root)
        only = source.without({index: "another file" for index in source.indices if index != episode})
        return not validate_source(only, frames=frames)
    except DatasetError:
        return False


def flipped(path: Path, flips: int) -> Iterator[None]:
    """Flips one bit of the file after the other, each time after the last bit was put right."""
    rng, size = np.random.default_rng(0), path.stat().st_size
    for _ in range(flips):
        place, bit = int(rng.integers(size)), 1 << int(rng.integers(8))
        for is_last in (False, True):
            with path.open("r+b") as file:
                file.seek(place)
                byte = file.read(1)[0]
                file.seek(place)
                file.write(bytes([byte ^ bit]))
            if not is_last:
                yield


def measure(name: str, folder: Path, flips: int, *, default: bool = True) -> Found:
    case = CASES[name]
    with tarfile.open(ARCHIVES / f"{case.dataset}.tar.gz") as tar:
        tar.extractall(folder, filter="data")
    root = folder / case.dataset
    path = next(root.glob(case.file))
    case.prepare(path)
    assert validates(root, case.episode, "all")
    expected = content(open_source(root), case.episode)
    harmless = found_by_default = found = 0
    for _ in flipped(path, flips):
        if validates(root, case.episode, "all"):
            harmless += content(open_source(root), case.episode) == expected
        else:
            found += 1
            found_by_default += default and not validates(root, case.episode, "ends")
    shutil.rmtree(root)
    return Found(flips, harmless, found_by_default, found)


def main() -> None:
    flips = int(sys.argv[1])
    print("| file | flips | harmless | found by default | found with `--frames all` |\n|---|---|---|---|---|")
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(name, Path(folder), flips)
        print(f"| {name} | {flips} | {found.harmless} | {found.default} | {found.all_frames} |", flush=True)


if __name__ == "__main__":
    main()
