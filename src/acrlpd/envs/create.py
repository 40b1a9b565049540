"""From a config to its environments and the execution of chunks in them, and whether a policy fits them."""

import contextlib
import math
from collections.abc import Mapping
from typing import Any

from acrlpd.config import RLTrainConfig
from acrlpd.data.pipeline.norm_stats import NormStats
from acrlpd.envs.env import RENAME, EnvError, EnvSpec
from acrlpd.envs.pool import EnvPool
from acrlpd.execution.base import ChunkExecution


def create_env_pool(rl_config: RLTrainConfig, *, num_workers: int | None = None, num_runs: int = 1) -> EnvPool:
    """The environments of a config, for `num_runs` runs together, with the cameras that its policy looks at."""
    config = rl_config.env
    if config.id is None:
        raise EnvError(
            "there is no environment: set env.id, or give --env to `acrlpd eval`. Without an environment, the report "
            "of a run (`acrlpd report`) judges the policy by held-out episodes"
        )
    return EnvPool(
        config.id,
        num_runs * config.num_envs,
        num_workers=num_workers,
        cameras=policy_cameras(rl_config),
        image_size=config.image_size,
        max_episode_steps=config.max_episode_steps,
        timeout_s=config.timeout_s,
    )


class EnvPools(contextlib.AbstractContextManager["EnvPools"]):
    """The environments of runs that train one after another, such as a run and its baselines.

    Runs that need the same environments get the same pool: starting the processes of a simulator takes seconds.
    """

    def __init__(self) -> None:
        self._pools: list[tuple[Any, EnvPool]] = []  # with what they were created for

    def get(self, rl_config: RLTrainConfig, *, num_runs: int) -> EnvPool:
        """The environments of a config, for `num_runs` runs together; they are closed with this object."""
        wanted = rl_config.env, policy_cameras(rl_config), num_runs
        for created_for, envs in self._pools:
            if created_for == wanted:
                return envs
        self._pools.append((wanted, create_env_pool(rl_config, num_runs=num_runs)))
        return self._pools[-1][1]

    def __exit__(self, *exception: object) -> None:
        for _, envs in self._pools:
            envs.close()


def create_execution(rl_config: RLTrainConfig) -> ChunkExecution:
    """How a config executes the chunks of its policy."""
    execution = rl_config.env.execution.for_horizon(rl_config.qchunking.chunk_length)
    for finding in execution.check(rl_config.model.action_horizon):
        if finding.level == "error":
            raise EnvError(finding.message)
    return execution


def policy_cameras(rl_config: RLTrainConfig) -> tuple[str, ...]:
    """The camera columns that the policy of a config looks at, which an environment has to render."""
    slots = rl_config.data.repack.cameras
    return tuple(slots[slot] for slot in rl_config.model.image_keys if slot in slots)


def check_environment(rl_config: RLTrainConfig, norm_stats: Mapping[str, NormStats] | None, spec: EnvSpec) -> None:
    """Refuses an environment that the policy of a config cannot act in."""
    columns, action_dim = rl_config.data.repack.state, rl_config.qchunking.action_dim
    for name in (*columns, *policy_cameras(rl_config)):
        if name not in spec.features:
            raise EnvError(
                f"data.repack names {name!r}, which environment {spec.name!r} does not give; it gives "
                f"{', '.join(spec.features)}. {RENAME}"
            )
    if spec.action_dim != action_dim:
        raise EnvError(
            f"environment {spec.name!r} has {spec.action_dim} action dims, the config's qchunking.action_dim is "
            f"{action_dim}"
        )
    stats = (norm_stats or {}).get("state")
    found = sum(math.prod(spec.features[name].shape) for name in columns)
    # A state of fewer dims than the policy's data had would be padded and mean nothing.
    if stats is not None and found not in stats.trained_dims(rl_config.model.action_dim):
        raise EnvError(
            f"environment {spec.name!r} gives a state of {found} dims ({', '.join(columns)}), the policy's norm "
            f"statistics have {stats.dim}: the policy was trained on another task or other columns"
        )
