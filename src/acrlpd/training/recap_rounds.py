"""RECAP in rounds: train, let the policy play, and train again from the first weights on all episodes so far.

Each round is an ordinary run, `<exp_name>-round<number>`. What the rounds share lies in `<exp_name>-rounds`: the replay
with the episodes that policies have played, and the dataset of each later round, which holds the demonstrations and
all episodes of the rounds before. A round never starts from the policy of another round, so that errors do not add up.
What is finished is not done again, so the same command continues after an interruption.
"""

import contextlib
import dataclasses
import logging
import pathlib

import numpy as np
import rich.table

from acrlpd.choice import kind_name
from acrlpd.config import ConfigError, RLTrainConfig, apply_config_overrides, config_to_yaml
from acrlpd.config.yaml_files import require_same_config
from acrlpd.console import Console
from acrlpd.data.pipeline.config_episodes import choose_episodes, open_config_source, read_all_rewards, read_columns
from acrlpd.data.pipeline.replay import Replay
from acrlpd.data.pipeline.returns import find_successes
from acrlpd.data.pipeline.rewards import read_rewards
from acrlpd.data.tools.join import SUCCESS, Part, join_datasets, require_equal_shapes
from acrlpd.envs.create import check_environment, create_env_pool, policy_cameras
from acrlpd.evaluation.statistics import wilson_interval
from acrlpd.files import LOCK, only_one, write_text_atomically
from acrlpd.policies.checkpoint import load_policy, open_checkpoint
from acrlpd.runs import directory as runs
from acrlpd.training.experiment import run_experiment
from acrlpd.training.online.records import REPLAY, read_round, read_rounds
from acrlpd.training.online.rounds import RoundPlayer, open_replay, replay_features
from acrlpd.training.options import RunOptions
from acrlpd.units import format_interval, format_percent

logger = logging.getLogger(__name__)


def check_rounds(rl_config: RLTrainConfig) -> None:
    """Refuses a config that cannot be trained in rounds, before anything is made."""
    if not rl_config.labels_prompts:
        raise ConfigError(
            "`acrlpd recap` needs an improvement that labels prompts: set improvement recap and "
            f"acrlpd.loss_weights.actor_weight 1; found improvement {kind_name(rl_config.improvement)}"
        )
    if rl_config.env.id is None:
        raise ConfigError("the policy of each round plays in an environment: set env.id")
    if len(rl_config.data.repack.actions) != 1:
        raise ConfigError(
            "rounds need actions in one column of the dataset; data.repack.actions names "
            f"{', '.join(rl_config.data.repack.actions)}"
        )


def run_rounds(rl_config: RLTrainConfig, *, num_rounds: int) -> int:
    """Trains and plays what is not finished; returns 0, or the exit code of the run that was stopped.

    The policy of each round plays `online.episodes_per_round` episodes.
    """
    directory = runs.run_directory(_named(rl_config, "rounds"))
    if num_rounds > 1 and not _data_directory(directory, 1).exists():
        _check_episodes(rl_config)
    directory.mkdir(parents=True, exist_ok=True)
    with only_one(directory, "working on these rounds; wait for it or stop it", ConfigError):
        _require_equal_config(directory, rl_config)
        for number in range(num_rounds):
            config = round_config(rl_config, number, directory)
            if code := _train(config):
                return code
            next_data = None if number == num_rounds - 1 else _data_directory(directory, number + 1)
            _play(config, number, directory, rl_config, next_data)
        print_table(rl_config, num_rounds, directory)
    return 0


def round_config(rl_config: RLTrainConfig, number: int, directory: pathlib.Path) -> RLTrainConfig:
    """The config of a round: that of all rounds, on the data of this round."""
    config, stats = _named(rl_config, f"round{number}"), rl_config.data.norm_stats_path
    if number == 0:
        return config
    assert stats is not None, "the first round has read them"
    changes = {
        "data.data_dir": str(_data_directory(directory, number)),
        # The statistics of the demonstrations: all rounds have the same units.
        "data.asset_id": stats.parent.relative_to(rl_config.data.assets_dir).as_posix(),
        "data.demonstrations.num_episodes": 0,
        # These two are of the demonstrations alone.
        "data.max_episodes": None,
        "data.frame_cache_dir": None,
        "data.rewards.source": "success_column",
        "data.rewards.success_column": SUCCESS,
        "data.rewards.labels_file": None,
    }
    return apply_config_overrides(config, changes)


def _check_episodes(rl_config: RLTrainConfig) -> None:
    """Refuses an environment whose episodes cannot be added to the demonstrations, before the first round trains."""
    with create_env_pool(dataclasses.replace(rl_config, env=dataclasses.replace(rl_config.env, num_envs=1))) as envs:
        spec = envs.spec
    check_environment(rl_config, None, spec)
    with contextlib.closing(open_config_source(rl_config)) as source:
        wanted = {name: source.features[name] for name in (*_columns(rl_config), *policy_cameras(rl_config))}
        places = str(source.root), f"environment {spec.name!r}"
    require_equal_shapes(wanted, replay_features(rl_config, spec), places)


def _columns(rl_config: RLTrainConfig) -> tuple[str, ...]:
    """The columns that the policy reads or learns from."""
    return *rl_config.data.repack.state, *rl_config.data.repack.actions


def _data_directory(directory: pathlib.Path, number: int) -> pathlib.Path:
    return directory / f"data-round{number}"


def _named(rl_config: RLTrainConfig, suffix: str) -> RLTrainConfig:
    return apply_config_overrides(rl_config, {"exp_name": f"{rl_config.exp_name}-{suffix}"})


def _require_equal_config(directory: pathlib.Path, rl_config: RLTrainConfig) -> None:
    """Refuses to continue rounds with another config: finished rounds would not fit the others."""
    file = directory / runs.CONFIG_FILE
    if file.is_file():
        require_same_config(file, rl_config, "rounds", "Give the same config, or choose another --exp_name")
    write_text_atomically(file, config_to_yaml(rl_config))


def _train(config: RLTrainConfig) -> int:
    """Trains the run of a round, unless it is finished; returns the exit code."""
    directory = runs.run_directory(config)
    if runs.is_finished(directory):
        return 0
    logger.info("%s", config.exp_name)
    has_begun = directory.exists() and any(path.name != LOCK for path in directory.iterdir())
    return run_experiment(config, RunOptions(resume=has_begun))


def _play(
    config: RLTrainConfig,
    number: int,
    directory: pathlib.Path,
    rl_config: RLTrainConfig,
    next_data: pathlib.Path | None,
) -> None:
    """Lets the policy of a round play, and writes the data of the next round, if there is one."""
    is_played = read_round(directory / REPLAY, number) is not None
    if is_played and (next_data is None or next_data.exists()):
        return
    checkpoint = open_checkpoint(runs.run_directory(config))
    with create_env_pool(config) as envs:
        check_environment(config, checkpoint.load_norm_stats(), envs.spec)
        replay = open_replay(directory, config, envs.spec)
        if not is_played:
            logger.info("%s plays %d episodes", config.exp_name, config.online.episodes_per_round or envs.num_envs)
            RoundPlayer(config, envs, replay).play(number, load_policy(checkpoint), checkpoint.step or 0)
    if next_data is not None and not next_data.exists():
        _write_data(next_data, rl_config, replay, number + 1)


def _write_data(output: pathlib.Path, rl_config: RLTrainConfig, replay: Replay, num_played: int) -> None:
    """The demonstrations and the episodes of the first `num_played` rounds, as one dataset."""
    # A round holds out episodes of all of its data, so nothing is held out here.
    data = dataclasses.replace(rl_config.data, validation_share=0.0)
    everything = open_config_source(rl_config)
    source, _ = choose_episodes(everything, data, read_all_rewards(everything, data))
    rewards = read_rewards(source, table := read_columns(source, rl_config.data, rewards=True), rl_config.data.rewards)
    demonstrated = np.split(find_successes(table, rewards), table.offsets[1:-1])
    played = read_rounds(replay.root, 0)[:num_played]
    replay.admit(episode for one in played for episode in one.episodes)
    lived = [replay.columns(index, (SUCCESS,))[SUCCESS].astype(bool) for index in replay.indices]
    join_datasets(
        output,
        [Part(source, demonstrated), Part(replay, lived)],
        columns=_columns(rl_config),
        cameras=policy_cameras(rl_config),
        default_prompt=rl_config.data.default_prompt,
    )


def print_table(rl_config: RLTrainConfig, num_rounds: int, directory: pathlib.Path) -> None:
    """How often the policy of each round succeeds: in the same episodes of evaluation, and in those that it played."""
    titles = ("evaluation", "95 % interval", "played", "95 % interval")
    columns = [rich.table.Column(title, justify="right") for title in titles]
    table = rich.table.Table("round", *columns, title=f"{rl_config.exp_name}: success", title_justify="left")
    for number in range(num_rounds):
        run = runs.run_directory(round_config(rl_config, number, directory))
        result, played = runs.read_summary(run)["evaluation"]["offline"], read_round(directory / REPLAY, number)
        assert played is not None, "all rounds were played"
        wins, episodes = sum(played.successes), len(played.episodes)
        table.add_row(
            str(number),
            format_percent(result["success_rate"]),
            format_interval(result["interval"]),
            f"{wins} of {episodes}",
            format_interval(wilson_interval(wins, episodes)) if episodes else "",
        )
    Console().print(table)
