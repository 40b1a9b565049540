"""`python -m acrlpd.training.actor RUN`: the actor's side of an asynchronous online phase."""

import contextlib
import logging
import os
import pathlib
import signal
import sys

import jax

from acrlpd.config import load_config
from acrlpd.data.dataset import norm_stats_dir
from acrlpd.data.norm_stats import load_norm_stats
from acrlpd.envs.agent_policy import create_agent_policy
from acrlpd.evaluation.protocol import create_env_pool, replan_steps
from acrlpd.training.actor_process import POLICY_FILE, acting_part, read_published
from acrlpd.training.compilation_cache import enable_compilation_cache
from acrlpd.training.rounds import RoundPlayer, open_replay, read_round
from acrlpd.training.run_directory import CONFIG_FILE
from acrlpd.training.sharding import FSDPSharding, abstract_train_state, create_fsdp_mesh

logger = logging.getLogger(__name__)


def main(directory: pathlib.Path) -> None:
    """Plays round after round with the newest published policy, until the learner is gone."""
    learner = os.getppid()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    enable_compilation_cache()
    rl_config = load_config(directory / CONFIG_FILE)
    with contextlib.ExitStack() as stack:
        envs = stack.enter_context(create_env_pool(rl_config))
        replay = open_replay(directory, rl_config, envs.spec)
        player = RoundPlayer(rl_config, envs, replay, replan_steps(rl_config))
        norm_stats = load_norm_stats(norm_stats_dir(rl_config.data))
        sharding = FSDPSharding(create_fsdp_mesh(1), rl_config.fsdp.min_size_mib)
        template = acting_part(abstract_train_state(rl_config, sharding), rl_config)
        number, published, policy, step = 0, None, None, 0
        while os.getppid() == learner:
            if read_round(replay.root, number) is None:
                newest = (directory / POLICY_FILE).stat().st_mtime_ns
                if newest != published:
                    agent, step = read_published(directory, template)
                    policy = create_agent_policy(jax.device_put(agent), rl_config, norm_stats, envs.spec)
                    published = newest
                assert policy is not None
                player.play(number, policy, step)
            number += 1


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
