"""What `acrlpd data validate --frames all` promises about flipped bits, on files of each format."""

from pathlib import Path

import pytest
from flipped_bits import CASES, measure

# The share of the flips that change what is read and that are found. HDF5 without checksums promises nothing.
PROMISED = {
    "parquet, as lerobot writes it": 0.4,
    "parquet with page checksums": 1.0,
    "PNG frames in parquet": 1.0,
    "MP4, AV1": 0.9,
    "MP4, H.264": 0.6,
    "HDF5, JPEG frames": 0.4,
    "HDF5, raw frames": 0.0,
    "HDF5 with fletcher32": 1.0,
}


def test_every_format_has_its_promise() -> None:
    assert PROMISED.keys() == CASES.keys()


@pytest.mark.parametrize("name", [name for name, share in PROMISED.items() if share])
def test_flipped_bits_are_found_as_promised(name: str, tmp_path: Path) -> None:
    found = measure(name, tmp_path, 16, default=False)
    assert found.harmful >= 8
    assert found.all_frames >= PROMISED[name] * found.harmful
