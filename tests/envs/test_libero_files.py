"""LIBERO's files: the real ones where hf-libero is installed, files made in the same way, and hostile ones."""

import hashlib
import importlib.util
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from libero_states import array_pickle, torch_file

from acrlpd.envs import EnvError
from acrlpd.envs.libero_files import read_initial_states, read_task_names

# Of hf-libero 0.1.4: tasks of a suite, task 3, the numbers in a state of task 3, and the beginnings of the SHA-256 of
# all names (one per line) and of all states (as numpy and pickle read them), both in the order of the benchmark.
SUITES = {
    "libero_spatial": (10, "pick_up_the_black_bowl_on_the_cookie_box", 92, "7c796ac50d3098f9", "8150b6164ded4fda"),
    "libero_object": (10, "pick_up_the_bbq_sauce_and_place_it", 110, "881f1d1f6a25b2bb", "a0f7cf4130219207"),
    "libero_goal": (10, "open_the_top_drawer_and_put_the_bowl_inside", 79, "12b86fc4e4066d22", "be96ab6d4cf535bb"),
    "libero_10": (10, "KITCHEN_SCENE4_put_the_black_bowl_in_the", 51, "73c164493fa01125", "7bcdaabe8eab8209"),
    "libero_90": (90, "KITCHEN_SCENE10_put_the_butter_at_the_back", 77, "309f6cac90421b3a", "fa48715df31b49de"),
}
PACKAGE = importlib.util.find_spec("libero")
installed = pytest.mark.skipif(PACKAGE is None, reason="needs hf-libero, which `make install-dev` installs")


def package() -> Path:
    assert PACKAGE is not None and PACKAGE.submodule_search_locations
    return Path(PACKAGE.submodule_search_locations[0]) / "libero"


@installed
@pytest.mark.parametrize("suite", SUITES)
def test_the_order_and_the_states_of_the_real_benchmark(suite: str) -> None:
    count, third, width, names_hash, states_hash = SUITES[suite]
    names = read_task_names(package(), suite)
    assert len(names) == count and names[3].startswith(third)
    assert hashlib.sha256("\n".join(names).encode()).hexdigest().startswith(names_hash)
    assert all((package() / "bddl_files" / suite / f"{name}.bddl").is_file() for name in names)
    states = [read_initial_states(package() / "init_files" / suite / f"{name}.pruned_init") for name in names]
    assert states[3].shape == (50, width) and {len(found) for found in states} == {50}
    assert hashlib.sha256(b"".join(found.tobytes() for found in states)).hexdigest().startswith(states_hash)


@installed
def test_all_files_of_initial_states_are_read() -> None:
    files = sorted((package() / "init_files").rglob("*init"))
    assert len(files) == 250
    assert all(np.isfinite(read_initial_states(path)).all() for path in files)


@installed
def test_torch_is_not_imported() -> None:
    code = f"""
import sys
from pathlib import Path
from acrlpd.envs.libero_files import read_task_names
read_task_names(Path({str(package())!r}), "libero_goal")
sys.exit("torch" in sys.modules or "libero.libero.benchmark" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def read(path: Path, content: bytes) -> np.ndarray:
    path.write_bytes(content)
    return read_initial_states(path)


@pytest.mark.parametrize("shape", [(1, 1), (50, 47), (50, 300), (300, 3)])
def test_a_file_made_in_the_same_way_gives_the_same_numbers(shape: tuple[int, int], tmp_path: Path) -> None:
    array = np.random.default_rng(0).normal(size=shape)
    np.testing.assert_array_equal(read(tmp_path / "states", torch_file(array_pickle(array))), array)


class Command:
    """Its pickle is a command for a shell."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch executed",)


class Evaluation:
    """Its pickle runs Python."""

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, ("open('executed', 'w')",)


HOSTILE = {
    "a command": (pickle.dumps(Command(), protocol=2), r"names (posix|nt)\.system"),
    "Python": (pickle.dumps(Evaluation(), protocol=2), r"names __builtin__\.eval"),
    "Python, new protocol": (pickle.dumps(Evaluation(), protocol=4), r"names builtins\.eval"),
    "another function of numpy": (b"cnumpy\nfromfile\n(X\x01\x00\x00\x00xtR.", r"names numpy\.fromfile"),
    "a part of a stand-in": (b"cnumpy\nndarray.to_numpy\n.", r"names numpy\.ndarray\.to_numpy"),
    "another encoding": (b"c_codecs\nencode\n(X\x01\x00\x00\x00aX\x03\x00\x00\x00ziptR.", "latin1, found zip"),
    "objects": (array_pickle(np.array([["a", None]], object)), "expected float64"),
    "integers": (array_pickle(np.zeros((2, 2), np.int64)), r"expected float64 \[n, d\], found <i8"),
    "one dimension": (array_pickle(np.zeros(4)), "expected float64"),
    "fewer bytes than its shape says": (
        array_pickle(np.zeros((2, 2))).replace(b"K\x02K\x02", b"K\x03K\x02"),
        "reshape",
    ),
    "no array": (pickle.dumps("text", protocol=2), "AttributeError"),
    "a pickle that is cut off": (array_pickle(np.zeros((2, 2)))[:-5], "Error"),
    "nothing": (b"", "EOFError"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_pickle_is_refused_and_nothing_is_called(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content, reason = HOSTILE[case]
    with pytest.raises(EnvError, match=rf"states does not hold initial states of LIBERO .*{reason}") as caught:
        read(tmp_path / "states", torch_file(content))
    assert "install hf-libero again" in str(caught.value)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("content", [b"", b"text", torch_file(b"")[:-30]])
def test_a_file_that_is_no_zip_is_refused(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(EnvError, match=r"states does not hold initial states .*BadZipFile"):
        read(tmp_path / "states", content)


def test_a_missing_order_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(EnvError, match=r"libero_suite_task_map\.py does not exist.*Install hf-libero"):
        read_task_names(tmp_path, "libero_goal")
