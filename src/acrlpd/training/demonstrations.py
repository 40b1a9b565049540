"""The first thing a run does: it makes the data that it can make itself.

Where the config has an environment but no data yet, the run collects demonstrations. The work itself is
`acrlpd.experts.demonstrations`. This module knows the config and the processes of a run.
"""

import pathlib

import jax

from acrlpd.config import ConfigError, RLTrainConfig, validate_config
from acrlpd.data.pipeline.config_norm_stats import write_norm_stats
from acrlpd.experts.demonstrations import DemonstrationSettings, collect_demonstrations
from acrlpd.experts.ogbench_datasets import require_play_of
from acrlpd.text import print
from acrlpd.training.distributed import barrier, is_primary

_TIMEOUT_S = 4 * 3600.0


def collect_missing_demonstrations(rl_config: RLTrainConfig, *, dry_run: bool = False) -> None:
    """Collects the dataset and the norm statistics that the config describes, unless they exist.

    One process collects and the others wait. A dry run writes nothing: it refuses to start without the dataset, and the
    checks of the config name statistics that are missing.
    """
    wanted, data, env = rl_config.data.demonstrations, rl_config.data, rl_config.env
    if env.id is not None and data.data_dir is not None:
        require_play_of(env.id, pathlib.Path(data.data_dir))
    if not wanted.num_episodes:
        if not (data.normalize or dry_run or data.data_dir is None):
            _write_missing_norm_stats(rl_config)  # They say that nothing is normalised, so there is nothing to choose.
        return
    if data.data_dir is None or env.id is None:
        raise ConfigError(
            "data.demonstrations needs data.data_dir, the directory of the dataset, and env.id, the environment"
        )
    directory = pathlib.Path(data.data_dir)
    if dry_run and not directory.exists():
        raise ConfigError(
            f"--dry_run: {directory} does not exist; the run would begin with {wanted.num_episodes} "
            f"demonstrations in {env.id}. `acrlpd plan` tells memory and step time without them"
        )
    if is_primary() and not directory.exists():
        # A config that is wrong is refused before minutes of work.
        validate_config(rl_config, num_devices=jax.device_count()).raise_for_errors()
        print(f"{directory} does not exist: collecting {wanted.num_episodes} demonstrations in {env.id}")
        settings = DemonstrationSettings(
            env=env.id,
            num_episodes=wanted.num_episodes,
            mix={wanted.quality: 1.0},
            seed=wanted.seed,
            image_size=env.image_size,
            max_episode_steps=wanted.max_episode_steps,
        )
        found = collect_demonstrations(settings, directory)
        print(f"{found.episodes} episodes, {found.successes} of them successes, {found.steps} steps")
    if not dry_run:
        _write_missing_norm_stats(rl_config)


def _write_missing_norm_stats(rl_config: RLTrainConfig) -> None:
    path = rl_config.data.norm_stats_path
    if is_primary() and path is not None and not path.is_file():
        write_norm_stats(rl_config)
    barrier("demonstrations", _TIMEOUT_S)
