"""Demonstrations for a run that has an environment but no data yet."""

import pathlib

import jax

from acrlpd.config import ConfigError, RLTrainConfig, validate_config
from acrlpd.training.distributed import barrier, is_primary

_TIMEOUT_S = 4 * 3600.0


def collect_missing_demonstrations(rl_config: RLTrainConfig, *, dry_run: bool = False) -> None:
    """Collects the dataset and the norm statistics that the config describes, unless they are there.

    One process collects; an interrupted collection goes on where it stopped. A dry run leaves no trace, so it
    collects nothing.
    """
    demonstrations, data = rl_config.data.demonstrations, rl_config.data
    if not demonstrations.num_episodes:
        return
    if data.data_dir is None or rl_config.env.id is None:
        raise ConfigError("data.demonstrations needs data.data_dir, where they go, and env.id, where they are played")
    if dry_run and not pathlib.Path(data.data_dir).exists():
        raise ConfigError(
            f"--dry_run: {data.data_dir} does not exist; the run would begin with {demonstrations.num_episodes} "
            f"demonstrations in {rl_config.env.id}. Without them `acrlpd plan` can tell memory and step time"
        )
    if is_primary():
        _collect(rl_config, pathlib.Path(data.data_dir), rl_config.env.id)
    barrier("demonstrations", _TIMEOUT_S)


def _collect(rl_config: RLTrainConfig, directory: pathlib.Path, env: str) -> None:
    wanted = rl_config.data.demonstrations
    if not directory.exists():
        from acrlpd.experts.demonstrations import DemonstrationSettings, collect_demonstrations

        # What is wrong with the config itself is said before minutes of work.
        validate_config(rl_config, num_devices=jax.device_count()).raise_for_errors()
        print(f"{directory} does not exist: collecting {wanted.num_episodes} demonstrations in {env}")
        settings = DemonstrationSettings(
            env=env,
            num_episodes=wanted.num_episodes,
            mix={wanted.quality: 1.0},
            seed=wanted.seed,
            image_size=rl_config.env.image_size,
            max_episode_steps=wanted.max_episode_steps,
        )
        found = collect_demonstrations(settings, directory)
        print(f"{found.num_episodes} episodes, {found.num_successes} of them successes, {found.num_steps} steps")
    stats = rl_config.data.norm_stats_path
    if stats is not None and not stats.is_file():
        from acrlpd.data.pipeline.dataset import write_norm_stats

        write_norm_stats(rl_config)
