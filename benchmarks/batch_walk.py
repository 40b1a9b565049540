"""Counts the project's files that a batch passes from the disk to a checkpoint.

    python benchmarks/batch_walk.py --dataset DIR     # a LeRobot dataset with cameras, such as tests/datasets/aloha_v30

A run of a small pi0 is set up with a frame cache, as a user would have it. Every Python function of the project that is
called is looked at, in all threads, while the dataset is opened and while the trainer trains: reading columns,
preparing batches, tracing and making the first update, saving the first checkpoint. A file counts if one of its
functions was given arrays (of numpy or JAX, traced ones included), alone or inside of dicts, sequences and dataclasses.
Two kinds of files are listed apart. Some only keep the run's books (metrics, progress, monitoring); most of these are
given numbers instead of arrays, because the metrics of a call are fetched and turned into numbers in one place. Others
are asked about the data, and no batch of this run passes them.
"""

import argparse
import dataclasses
import pathlib
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))
PACKAGE = str(ROOT / "src" / "acrlpd")
BOOKKEEPING = ("runs", "monitoring", "files.py", "training/progress.py")
# Decides where the data lies. The windows of a policy without cameras are made there; this run has a camera.
ASKED = ("data/pipeline/device_rows.py",)


class Recorder:
    """Keeps the file of every function of the project that is given arrays while `is_on`, in every thread."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.is_on = False
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def record(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its calls recorded."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.is_on = True
            try:
                return function(*args, **kwargs)
            finally:
                self.is_on = False

        return recorded

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if not self.is_on or event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        file = code.co_filename[len(PACKAGE) + 1 :]
        if file not in self.files:
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            if any(holds_arrays(frame.f_locals.get(name)) for name in names if name != "self"):
                self.files.add(file)


def holds_arrays(value: Any, depth: int = 3) -> bool:
    import jax
    import numpy as np

    if isinstance(value, (np.ndarray, jax.Array)):
        return True
    if depth == 0 or isinstance(value, (str, bytes, type)):
        return False
    if isinstance(value, Mapping):
        parts: Any = list(value.values())
    elif isinstance(value, (list, tuple)):
        parts = value
    elif dataclasses.is_dataclass(value):
        parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    else:
        return False
    return any(holds_arrays(part, depth - 1) for part in parts[:20])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=pathlib.Path, required=True)
    args = parser.parse_args()

    from acrlpd.config import apply_config_overrides, get_config
    from acrlpd.data.frames.cache_builder import build_frame_cache
    from acrlpd.data.pipeline.config_norm_stats import write_norm_stats
    from acrlpd.data.pipeline.labels import Labels
    from acrlpd.data.sources.source import open_source
    from acrlpd.data.tools.label import label_list
    from acrlpd.training import train_runs
    from acrlpd.training.options import RunOptions

    recorder = Recorder()
    train_runs.create_data_loader = recorder.record(train_runs.create_data_loader)
    train_runs.train = recorder.record(train_runs.train)
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        source = open_source(str(args.dataset))
        camera = source.cameras[0]
        build_frame_cache(source, directory / "cache", height=28, width=28, cameras=(camera,))
        dims = source.features["action"].shape[0]
        changes = {
            "data.repo_id": None,
            "data.data_dir": str(args.dataset),
            "data.frame_cache_dir": str(directory / "cache"),
            "data.assets_dir": str(directory / "assets"),
            "data.repack.base_0_rgb": camera,
            "data.rewards.labels_file": str(directory / "labels.json"),
            "qchunking.action_dim": dims,
            "training.offline_steps": 1,
            "training.save_frequency": 1,
        }
        Labels(directory / "labels.json", label_list(source, range(len(source)), [])).save()
        config = apply_config_overrides(get_config("debug"), changes)
        write_norm_stats(config)
        train_runs.train_runs([config], [directory / "run"], RunOptions())
    books, asked = (sorted(file for file in recorder.files if file.startswith(kind)) for kind in (BOOKKEEPING, ASKED))
    way = sorted(recorder.files.difference(books, asked))
    for what, files in (("on the way of a batch", way), ("that keep the books", books), ("that are only asked", asked)):
        print(f"{len(files)} files {what}:\n  " + "\n  ".join(files))


if __name__ == "__main__":
    main()
