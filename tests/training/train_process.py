"""A training run in a process of its own: what the tests of kills, signals and several hosts start.

Given one JSON object: the config file, what `run_experiment` takes, and faults to inject.
"""

import gc
import json
import os
import pathlib
import resource
import signal
import sys
import time
from typing import Any

ORDER = json.loads(sys.argv[1])
gc.set_threshold(50_000)  # as the `acrlpd` command does


def before_step(step: int) -> None:
    """Called for every step before the batches of its call are taken."""
    if ORDER.get("report_steps"):
        print(f"step {step}", flush=True)
    if step == 0 and "memory_headroom_bytes" in ORDER:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + ORDER["memory_headroom_bytes"]
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    if step == ORDER.get("kill_before_step"):
        os.kill(os.getpid(), signal.SIGKILL)
    if step == ORDER.get("signal_before_step"):
        os.kill(os.getpid(), ORDER["signal"])
    faults = (
        *("limit_files", "unlimit_files", "lock_directory", "unlock_directory"),
        *("short_barriers", "long_barriers"),
    )
    if step in [ORDER.get(f"{fault}_before_step") for fault in faults]:
        TRAINERS[-1].writer.wait()  # the save under way happens under the old limit
    if step == ORDER.get("lock_directory_before_step"):
        TRAINERS[-1].directory.chmod(0o555)
    if step == ORDER.get("unlock_directory_before_step"):
        TRAINERS[-1].directory.chmod(0o755)
    if step == ORDER.get("short_barriers_before_step"):
        set_barrier_timeout(2)
    if step == ORDER.get("long_barriers_before_step"):
        set_barrier_timeout(300)
    if step == ORDER.get("limit_files_before_step"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (ORDER["file_limit_bytes"], resource.RLIM_INFINITY))
    if step == ORDER.get("unlimit_files_before_step"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if step >= ORDER.get("sleep_from_step", 0):
        time.sleep(ORDER.get("sleep_s", 0.0))


TRAINERS: list[Any] = []


def set_barrier_timeout(seconds: int) -> None:
    """How long the processes wait for each other in a save."""
    from orbax.checkpoint._src.multihost import multihost

    multihost._DEFAULT_BARRIER_TIMEOUT = seconds


def watch_steps() -> None:
    from acrlpd.data.pipeline.loader import DataLoader
    from acrlpd.training.trainer import Trainer

    initialize = Trainer.__init__

    def remembered(self: Trainer, *args: Any, **kwargs: Any) -> None:
        TRAINERS.append(self)
        initialize(self, *args, **kwargs)

    Trainer.__init__ = remembered  # type: ignore[method-assign]
    sample_feed = DataLoader.sample_feed

    def watched(self: DataLoader, num_updates: int) -> Any:
        first = self.state_dict()["step"]
        for step in range(first, first + num_updates):
            before_step(step)
        return sample_feed(self, num_updates)

    DataLoader.sample_feed = watched  # type: ignore[method-assign]


def watch_replay() -> None:
    """`kill_after_writes`: dies when so many episodes were written by this process."""
    from acrlpd.data.pipeline.replay import Replay

    write, left = Replay.write, iter(range(ORDER.get("kill_after_writes", sys.maxsize) - 1, -1, -1))

    def watched(self: Replay, *args: Any) -> None:
        write(self, *args)
        if next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    Replay.write = watched  # type: ignore[method-assign]


def watch_saves() -> None:
    """`kill_in_save_of_step`: dies when the first part of that checkpoint is complete, before the checkpoint is."""
    written = f"/{ORDER['kill_in_save_of_step']}.orbax-checkpoint-tmp"

    def watched(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename" and written in str(arguments[0]):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watched)


def evaluate(_agent: Any, step: int) -> dict[str, float]:
    return {"success_rate": ORDER["scores"][str(step)]}


def main() -> int:
    # Imported here, because the processes of environments import this file too and do not need JAX.
    from acrlpd.config import load_config
    from acrlpd.training import distributed, experiment
    from acrlpd.training.distributed import DistributedOptions, initialize_distributed
    from acrlpd.training.online import actor
    from acrlpd.training.options import RunOptions

    distributed.HEARTBEAT_TIMEOUT_S = ORDER.get("heartbeat_timeout_s", distributed.HEARTBEAT_TIMEOUT_S)
    actor.MAX_STARTS_IN_A_ROW = ORDER.get("max_actor_starts", actor.MAX_STARTS_IN_A_ROW)
    initialize_distributed(DistributedOptions(**ORDER.get("distributed", {})))
    watch_steps()
    watch_replay()
    if "kill_in_save_of_step" in ORDER:
        watch_saves()
    config = load_config(ORDER["config"])
    return experiment.run_experiment(
        config, RunOptions(**ORDER.get("options", {})), evaluate if "scores" in ORDER else None
    )


if __name__ == "__main__":
    sys.exit(main())
