"""Counts the project's files that a batch passes from the disk to a checkpoint.

    python benchmarks/batch_walk.py --dataset DIR     # a LeRobot dataset with cameras, such as tests/datasets/aloha_v30

A run of a small pi0 is set up with a frame cache, as a user would have it. Then every Python function of the project
that runs is recorded, in all threads, while the loader reads and prepares batches, the first update is traced and made,
and its checkpoint is written. A file counts if one of its functions ran. What happens before (opening the dataset,
making the agent) and after is not part of a batch's way. Files that only keep the run's books (progress, metrics,
monitoring) are listed apart.
"""

import argparse
import pathlib
import sys
import tempfile
import threading
from types import FrameType
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))
PACKAGE = str(ROOT / "src" / "acrlpd")
BOOKKEEPING = ("runs", "monitoring", "files.py", "training/progress.py")


class Recorder:
    """Keeps the file of every function of the project that is entered while `is_on`, in every thread."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.is_on = False
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if self.is_on and event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name != "<module>":
            self.files.add(code.co_filename[len(PACKAGE) + 1 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=pathlib.Path, required=True)
    args = parser.parse_args()

    from acrlpd.config import apply_config_overrides, get_config
    from acrlpd.data.frames.cache_builder import build_frame_cache
    from acrlpd.data.pipeline.dataset import write_norm_stats
    from acrlpd.data.pipeline.rewards import Labels
    from acrlpd.data.sources.source import open_source
    from acrlpd.data.tools.label import label_list
    from acrlpd.training.train_run import train_run
    from acrlpd.training.trainer import Trainer

    recorder, train = Recorder(), Trainer.train

    def recorded_train(self: Trainer) -> None:
        recorder.is_on = True
        train(self)
        recorder.is_on = False

    Trainer.train = recorded_train  # type: ignore[method-assign]
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
        train_run(config, directory / "run")
    files = recorder.files
    books = sorted(file for file in files if file.startswith(BOOKKEEPING))
    way = sorted(files - set(books))
    print(f"{len(way)} files on the way of a batch:\n  " + "\n  ".join(way))
    print(f"{len(books)} files that keep the books:\n  " + "\n  ".join(books))


if __name__ == "__main__":
    main()
