"""Reading a metrics.jsonl that grows, that is cut off, or that a resumed run replaces."""

import json
import os
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from acrlpd.runs.metrics_log import MetricsReader, Phase


def line(step: int, **metrics: float | str | None) -> bytes:
    return json.dumps({"step": step, **metrics}).encode() + b"\n"


def values(reader: MetricsReader, name: str = "total_loss") -> list[float]:
    reader.read()
    return reader.series[name].values.tolist()


@given(st.lists(st.integers(1, 60), max_size=30))
def test_a_file_in_pieces_is_the_same_file(sizes: list[int]) -> None:
    """However the bytes arrive, the series are those of the complete lines."""
    content = b"".join(line(i, total_loss=float(i)) for i in range(1, 13)) + b'{"step": 13, "total'
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "metrics.jsonl"
        reader, start = MetricsReader(path), 0
        for size in [*sizes, len(content)]:
            with path.open("ab") as file:
                file.write(content[start : start + size])
            start += size
            reader.read()
    series = reader.series["total_loss"]
    assert series.steps.tolist() == series.values.tolist() == list(range(1, 13))


def test_only_new_bytes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1, total_loss=1.0))
    reader = MetricsReader(path)
    assert values(reader) == [1.0]
    with path.open("r+b") as file:
        file.write(b"#" * 5)  # the reader does not look here again
        file.seek(0, os.SEEK_END)
        file.write(line(2, total_loss=2.0))
    assert values(reader) == values(reader) == [1.0, 2.0]


def test_a_resumed_run_replaces_its_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(line(i, total_loss=float(i), phase="offline") for i in range(10)))
    reader = MetricsReader(path)
    assert len(values(reader)) == 10
    (tmp_path / "new").write_bytes(b"".join(line(i, total_loss=-1.0, phase="online") for i in range(12)))
    (tmp_path / "new").replace(path)
    assert values(reader) == [-1.0] * 12
    assert reader.phases == [Phase("online", 0, 11)]


def test_lines_of_all_kinds(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    good = [line(10, phase="offline", loss=1.0), line(20, phase="offline", loss=None), line(30, phase="online", q=2)]
    path.write_bytes(b"".join([*good, b"\n", b"not json\n", b"[1]\n", b'{"loss": 3.0}\n', b'{"step": 40, "lo']))
    reader = MetricsReader(path)
    np.testing.assert_array_equal(values(reader, "loss"), [1.0, np.nan])
    assert values(reader, "q") == [2.0] and set(reader.series) == {"loss", "q"}
    assert reader.phases == [Phase("offline", 10, 20), Phase("online", 30, 30)]
    assert reader.num_broken == 3


def test_a_file_that_is_not_there_has_no_series(tmp_path: Path) -> None:
    reader = MetricsReader(tmp_path / "metrics.jsonl")
    reader.read()
    assert reader.series == {} and reader.phases == []
