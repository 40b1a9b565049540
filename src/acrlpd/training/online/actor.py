"""`python -m acrlpd.training.online.actor RUN LEARNER`: the actor's side of an asynchronous online phase.

Started by `ActorProcess`; LEARNER is the process id of whoever trains.
"""

import contextlib
import fcntl
import os
import pathlib
import signal
import sys
from collections.abc import Sequence

import jax

from acrlpd.config import load_config
from acrlpd.data.pipeline.dataset import load_config_norm_stats
from acrlpd.envs.env import Columns
from acrlpd.envs.rollouts import ChunkPolicy, Chunks
from acrlpd.evaluation.protocol import create_env_pool, replan_steps
from acrlpd.policies.agent_policy import create_agent_policy
from acrlpd.process import enable_compilation_cache
from acrlpd.runs.directory import CONFIG_FILE
from acrlpd.training.online.actor_process import LOCK_FILE, POLICY_FILE, acting_part, read_published
from acrlpd.training.online.rounds import RoundPlayer, acting_candidates, open_replay, read_round
from acrlpd.training.sharding import FSDPSharding, abstract_train_state, create_fsdp_mesh


def main(directory: pathlib.Path, learner: int) -> None:
    """Plays round after round with the newest published policy, until the learner is gone."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the learner decides what an interrupt means
    enable_compilation_cache()
    rl_config = load_config(directory / CONFIG_FILE)
    with contextlib.ExitStack() as stack:
        # The actor of a learner that was killed may still be in its last chunk.
        lock = stack.enter_context((directory / LOCK_FILE).open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        envs = stack.enter_context(create_env_pool(rl_config))
        replay = open_replay(directory, rl_config, envs.spec)
        player = RoundPlayer(rl_config, envs, replay, replan_steps(rl_config))
        norm_stats = load_config_norm_stats(rl_config.data)
        sharding = FSDPSharding(create_fsdp_mesh(1), rl_config.fsdp.min_size_mib)
        template = acting_part(abstract_train_state(rl_config, sharding), rl_config)
        number = 0
        published: int | None = None
        while os.getppid() == learner:
            if read_round(replay.root, number) is None:
                newest = (directory / POLICY_FILE).stat().st_mtime_ns
                if newest != published:
                    agent, step = read_published(directory, template)
                    policy = create_agent_policy(
                        jax.device_put(agent),
                        rl_config,
                        norm_stats,
                        envs.spec,
                        num_samples=acting_candidates(rl_config),
                    )
                    published = newest
                player.play(number, _ends_with(learner, policy), step)
            number += 1


def _ends_with(learner: int, policy: ChunkPolicy) -> ChunkPolicy:
    """The policy, which nobody needs any more when the learner is gone."""

    def act(observations: Columns, prompts: Sequence[str], seed: int) -> Chunks:
        if os.getppid() != learner:
            sys.exit("the learner is gone")
        return policy(observations, prompts, seed)

    return act


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
