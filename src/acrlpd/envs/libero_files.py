"""LIBERO's files without torch: the order of a suite's tasks, and the fixed initial states of a task."""

import pickle
import runpy
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from acrlpd.envs.env import EnvError

_MAX_BYTES = 2**26  # the largest file of LIBERO has 118 KB


def read_task_names(package: Path, suite: str) -> list[str]:
    """The tasks of a suite in the order of LIBERO's benchmark, which is not the order of the alphabet.

    `package` is the directory of `libero.libero`. The file is run by its path, because an import of its package
    `benchmark` would import torch.
    """
    path = package / "benchmark" / "libero_suite_task_map.py"
    if not path.is_file():
        raise EnvError(f"{path} does not exist: LIBERO's tasks have no order. Install hf-libero (docs/environments.md)")
    return list(runpy.run_path(str(path))["libero_task_map"][suite])


def read_initial_states(path: Path) -> np.ndarray:
    """The states [n, d] of the simulator from which LIBERO's own evaluation starts the episodes of a task."""
    try:
        with zipfile.ZipFile(path) as archive:
            content = archive.getinfo("archive/data.pkl")
            if content.file_size > _MAX_BYTES:
                raise ValueError(f"{content.file_size} bytes, at most {_MAX_BYTES} are expected")
            with archive.open(content) as file:
                return _Unpickler(file).load().to_numpy()
    except FileNotFoundError:
        raise EnvError(f"{path} does not exist: check the paths in LIBERO's config.yaml") from None
    except Exception as error:  # a damaged pickle raises errors of any kind
        raise EnvError(
            f"{path} does not hold initial states of LIBERO ({type(error).__name__}: {error}); install hf-libero again"
        ) from error


class _Unpickler(pickle.Unpickler):
    """Reads a pickle of one array of numbers, and refuses every other pickle.

    torch writes arrays as a zip with a pickle inside, and LIBERO has its initial states in no other form. A pickle may
    call any function by its name, so this project unpickles nowhere else. LIBERO's files name four functions; here
    each of them is a stand-in that keeps what the file says. Therefore a file can call nothing outside of this module.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STAND_INS:
            raise pickle.UnpicklingError(f"the file names {module}.{name}, which is not part of an array")
        return _STAND_INS[module, name]


class _Dtype:
    """Stands in for `numpy.dtype`."""

    def __init__(self, code: str, align: bool, copy: bool) -> None:
        self.code, self.byte_order = code, ""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.byte_order = state[1]


class _Array:
    """Stands in for `numpy.ndarray`."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self.shape, self.dtype, self.is_fortran, self.content = state

    def to_numpy(self) -> np.ndarray:
        if (self.dtype.byte_order, self.dtype.code, self.is_fortran, len(self.shape)) != ("<", "f8", False, 2):
            raise ValueError(f"expected float64 [n, d], found {self.dtype.byte_order}{self.dtype.code} {self.shape}")
        return np.frombuffer(self.content, "<f8").reshape(self.shape)


def _encode(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise ValueError(f"bytes are expected as latin1, found {encoding}")
    return text.encode("latin1")


_STAND_INS = {
    ("numpy.core.multiarray", "_reconstruct"): lambda kind, shape, code: _Array(),
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
}
