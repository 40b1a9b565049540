import logging
import os
import pathlib
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acrlpd.files import (
    JsonLinesFile,
    are_plain_names,
    is_plain_name,
    is_whole_number,
    path_within,
    read_json_lines,
)

PROCESS = """
import pathlib, resource, signal, sys
from acrlpd.files import JsonLinesFile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
file = JsonLinesFile(pathlib.Path(sys.argv[1]))
for i in range(10):
    if i == 3:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    if i == 8:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    file.append({"number": i, "text": "x" * 20})
"""


@pytest.mark.parametrize("text", ["0", "7", "30000"])
def test_whole_numbers(text: str) -> None:
    assert is_whole_number(text) and str(int(text)) == text


@pytest.mark.parametrize("text", ["", "²", "٣", "১", "07", "-1", "1.0", "1_000", " 1", "1\n", "9" * 5000])
def test_texts_that_are_no_whole_numbers(text: str) -> None:
    assert not is_whole_number(text)


def test_what_did_not_fit_is_written_when_there_is_room(tmp_path: pathlib.Path) -> None:
    """A real limit on the file's size, in the middle of a line, and lifted later."""
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, str(tmp_path / "lines.jsonl")], capture_output=True, text=True, check=True
    )
    assert [entry["number"] for entry in read_json_lines(tmp_path / "lines.jsonl")] == list(range(10))
    assert done.stderr.count("cannot be written") == 1


def test_the_last_lines_are_written_when_there_is_space_again(tmp_path: pathlib.Path) -> None:
    """No later line takes them along, so the one who writes has to ask for it."""
    folder = tmp_path / "gone for a while"
    file = JsonLinesFile(folder / "metrics.jsonl")
    file.append({"step": 1})
    folder.mkdir()
    file.flush()
    assert file.read() == [{"step": 1}]


def test_a_full_disk_is_reported_once(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "lines.jsonl"
    path.symlink_to("/dev/full")
    file = JsonLinesFile(path)
    with caplog.at_level(logging.WARNING, "acrlpd"):
        for i in range(3):
            file.append({"number": i})
    assert len(caplog.records) == 1
    path.unlink()
    file.append({"number": 3})
    assert [entry["number"] for entry in read_json_lines(path)] == [0, 1, 2, 3]


def test_a_cut_off_line_is_left_out(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "lines.jsonl"
    file = JsonLinesFile(path)
    file.append({"number": 0})
    with path.open("a") as cut:
        cut.write('{"number": 1')
    assert file.read() == [{"number": 0}]


@pytest.mark.parametrize("line", ['{"step": 10, "loss": bro', "\0\0\0", "[1, 2]"])
def test_a_damaged_line_is_named(line: str, tmp_path: pathlib.Path) -> None:
    """As a resumed run finds it: which file, which line, what to do."""
    path = tmp_path / "lines.jsonl"
    path.write_text(f'{{"number": 0}}\n{line}\n{{"number": 2}}\n')
    with pytest.raises(ValueError, match=rf"{path}: line 2 is damaged .*; remove this line"):
        read_json_lines(path)


def test_no_path_no_file() -> None:
    file = JsonLinesFile(None)
    file.append({"number": 0})
    file.replace([])
    assert file.read() == []


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\\b", "a\0b", "a\nb", "\x1b[2J", "\ud800", "x" * 256])
def test_what_is_no_name_of_a_file(name: str) -> None:
    assert not is_plain_name(name)


@pytest.mark.parametrize("names", ["libero", "physical-intelligence/libero", "a b/ü", "...", "-x", "~", "a..b/.c"])
def test_names_that_people_use(names: str, tmp_path: pathlib.Path) -> None:
    assert path_within(tmp_path, names, "asset_id") == tmp_path / names


@given(st.lists(st.sampled_from(["..", ".", "", "/", "a", "~", "\\", "b c"]), max_size=6).map("/".join) | st.text())
def test_a_path_lies_within_or_is_refused(names: str) -> None:
    root = pathlib.Path("/some/where")
    if are_plain_names(names):
        assert pathlib.Path(os.path.normpath(path_within(root, names, "x"))).is_relative_to(root)
        assert os.path.normpath(root / names) != str(root)
    else:
        with pytest.raises(ValueError, match=r"x is .*, expected plain names"):
            path_within(root, names, "x")
