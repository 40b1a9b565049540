"""`python -m acrlpd.training.online.actor RUN LEARNER`: the actor's side of an asynchronous online phase.

`ActorProcess` starts it; LEARNER is the process id of the trainer.
"""

import contextlib
import dataclasses
import fcntl
import os
import pathlib
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial

import jax

from acrlpd.config import RLTrainConfig, load_config
from acrlpd.config.create_agent import create_agent
from acrlpd.data.pipeline.dataset import load_config_norm_stats
from acrlpd.data.pipeline.norm_stats import NormStats
from acrlpd.envs import ChunkPolicy, Chunks
from acrlpd.envs.create import create_env_pool
from acrlpd.execution.base import Columns
from acrlpd.policies.acting_model import acting_model
from acrlpd.policies.policy import Policy
from acrlpd.process import enable_compilation_cache
from acrlpd.runs.directory import CONFIG_FILE
from acrlpd.training.online.actor_process import LOCK_FILE, POLICY_FILE, read_published
from acrlpd.training.online.rounds import RoundPlayer, create_online_policy, open_replay, read_round


def main(directory: pathlib.Path, learner: int) -> None:
    """Plays round after round with the newest published policy, until the learner is gone."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the learner answers an interrupt and ends this process
    enable_compilation_cache()
    rl_config = load_config(directory / CONFIG_FILE)
    with contextlib.ExitStack() as stack:
        # The actor of a learner that was killed may still be executing its last chunk.
        lock = stack.enter_context((directory / LOCK_FILE).open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        envs = stack.enter_context(create_env_pool(rl_config))
        replay = open_replay(directory, rl_config, envs.spec)
        player = RoundPlayer(rl_config, envs, replay)
        published = PublishedPolicy(directory, rl_config, load_config_norm_stats(rl_config.data))
        number = 0
        while os.getppid() == learner:
            if read_round(replay.root, number) is None:
                policy, step = published.newest()
                player.play(number, _ends_with(learner, policy), step)
            number += 1


class PublishedPolicy:
    """The policy that the learner publishes, as the actor acts with it."""

    def __init__(
        self, directory: pathlib.Path, rl_config: RLTrainConfig, norm_stats: Mapping[str, NormStats] | None
    ) -> None:
        self._directory = directory
        agent = jax.eval_shape(partial(create_agent, rl_config), jax.random.key(0))
        self._template = acting_model(agent, rl_config)
        self._policy = create_online_policy(self._template, rl_config, norm_stats)
        self._step = 0
        self._read_at: int | None = None  # time stamp of the file that was read

    def newest(self) -> tuple[Policy, int]:
        """The newest policy and its step; reads the file only if it has changed."""
        written_at = (self._directory / POLICY_FILE).stat().st_mtime_ns
        if written_at != self._read_at:
            model, self._step = read_published(self._directory, self._template)
            self._policy = dataclasses.replace(self._policy, model=jax.device_put(model))
            self._read_at = written_at
        return self._policy, self._step


def _ends_with(learner: int, policy: ChunkPolicy) -> ChunkPolicy:
    """The policy; once the learner is gone, asking it ends this process."""

    def act(observations: Columns, prompts: Sequence[str], seeds: Sequence[int]) -> Chunks:
        if os.getppid() != learner:
            sys.exit("the learner is gone")
        return policy(observations, prompts, seeds)

    return act


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
