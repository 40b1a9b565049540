"""OGBench's own dataset files (.npz): what they must hold, and their episodes."""

import itertools
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from acrlpd.data.sources.source import DatasetError
from acrlpd.envs.env import Env
from acrlpd.envs.ogbench_env import RAW_STATE
from acrlpd.experts.ogbench_rewards import Rows


def validation_file(path: Path) -> Path:
    """The file with the validation episodes: OGBench's name, next to the training file."""
    file = path.with_name(f"{path.stem}-val.npz")
    if path.is_file() and not file.is_file():
        raise DatasetError(
            f"{file} is missing: OGBench's datasets are two files, and {path.name} is the one with the training "
            "episodes. Put the validation file next to it"
        )
    return file


def read_play_file(path: Path, env: Env) -> Rows:
    """The arrays of a file. Refuses a file that is damaged or that another environment has made."""
    widths = {
        "observations": (env.spec.features[RAW_STATE].shape[0],),
        "actions": (env.spec.action_dim,),
        "terminals": (),
        "qpos": (env.env.model.nq,),
    }
    if hasattr(env.env, "_num_buttons"):
        widths["button_states"] = (env.env._num_buttons,)
    rows = _load(path, tuple(widths))
    for name, width in widths.items():
        _check_array(path, name, rows[name], (*rows["observations"].shape[:1], *width), env)
    terminals = rows["terminals"]
    if not len(terminals) or not terminals[-1]:
        raise DatasetError(
            f"{path}: the last row of 'terminals' must be true, because every episode ends with a terminal; found "
            f"{np.count_nonzero(terminals)} terminals in {len(terminals)} rows. The file is cut off: get it again"
        )
    return rows


def split_episodes(rows: Rows) -> Iterator[Rows]:
    """The episodes of a file; each one ends with a terminal."""
    ends = (np.flatnonzero(rows["terminals"]) + 1).tolist()
    for start, end in itertools.pairwise([0, *ends]):
        yield {name: values[start:end] for name, values in rows.items()}


def _load(path: Path, names: tuple[str, ...]) -> Rows:
    if not path.is_file():
        raise DatasetError(f"{path}: no such file; expected one of OGBench's files, such as cube-double-play-v0.npz")
    damaged = f"{path} is not a whole .npz file ({path.stat().st_size} bytes): get it again"
    if not zipfile.is_zipfile(path):
        raise DatasetError(damaged)
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = [name for name in names if name not in file.files]
            if missing:
                raise DatasetError(
                    f"{path} has no {' and no '.join(map(repr, missing))}; expected the arrays {', '.join(names)}, "
                    f"found {', '.join(file.files)}. Rewards are computed from these arrays: take OGBench's own file"
                )
            return {name: file[name] for name in names}
    except DatasetError:
        raise
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DatasetError(f"{damaged} ({type(error).__name__}: {error})") from error


def _check_array(path: Path, name: str, array: np.ndarray, shape: tuple[int, ...], env: Env) -> None:
    if array.shape != shape or array.dtype.kind not in "fiub":
        raise DatasetError(
            f"{path}: {name!r} is {array.dtype} {list(array.shape)}, expected numbers {list(shape)}, which {env.name} "
            "has. Name the environment of the file with --env"
        )
    finite = np.isfinite(array).reshape(len(array), -1).all(axis=1)
    if not finite.all():
        raise DatasetError(
            f"{path}: {name!r} must be finite, found NaN or infinity in {int((~finite).sum())} rows, the first is row "
            f"{int(np.argmin(finite))}. The file is damaged: get it again"
        )
