"""A run is compared with cloning, cloning of successes, a policy of successes, and offline RL for as many updates."""

import json
import os
import pathlib
import shutil
import signal
from typing import Any

import numpy as np
import pytest
from training_helpers import Processes, arrays_of, metrics_of, online_config

from acrlpd.config import ConfigError, RLTrainConfig, apply_config_overrides, load_config
from acrlpd.cores import usable_cores
from acrlpd.runs.directory import read_summary, run_directory
from acrlpd.runs.record import STAGES
from acrlpd.training.baselines import baseline_config, run_comparison
from acrlpd.training.experiment import run_experiment
from acrlpd.training.options import RunOptions

OFFLINE, ONLINE = 8, 6
LAST = OFFLINE + ONLINE
BASELINES = ["bc", "bc_success_only", "offline_success", "offline_continued"]


def config_of(directory: pathlib.Path) -> RLTrainConfig:
    return online_config(
        directory, offline_steps=OFFLINE, online_steps=ONLINE, log_frequency=1, evaluation__baselines=BASELINES
    )


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory, processes: Processes) -> tuple[pathlib.Path, str]:
    """A comparison that is stopped in its first baseline and in the online phase, and resumed each time."""
    config = config_of(tmp_path_factory.mktemp("runs"))
    directory = run_directory(config)
    terminate = {"signal": signal.SIGTERM}
    stopped = processes.run(config, order={"signal_before_step": 3, **terminate})
    assert stopped.returncode == 143, stopped.output
    assert read_summary(directory / "baselines" / "bc")["final_step"] == 4
    assert (directory / "config.yaml").is_file()  # --overwrite removes only directories with a config
    assert not read_summary(directory)

    stopped = processes.run(config, order={"signal_before_step": OFFLINE + 3, **terminate}, resume=True)
    assert stopped.returncode == 143, stopped.output
    assert read_summary(directory)["final_step"] == OFFLINE + 4
    finished = [directory / "baselines" / name / "summary.json" for name in BASELINES[:2]]
    contents = [path.read_bytes() for path in finished]

    starts = tmp_path_factory.mktemp("starts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOY_STARTS", str(starts))
        resumed = processes.run(config, resume=True)
    assert resumed.returncode == 0, resumed.output
    # The baseline acts in the environments of the run.
    assert len(list(starts.iterdir())) == min(config.env.num_envs, usable_cores())
    assert [path.read_bytes() for path in finished] == contents  # not trained again
    return directory, resumed.output


def test_the_summary_has_all_six_in_order(compared: tuple[pathlib.Path, str]) -> None:
    directory, output = compared
    evaluation = read_summary(directory)["evaluation"]
    assert list(evaluation) == ["bc", "bc_success_only", "offline", "offline_success", "offline_continued", "online"]
    steps = [found["step"] for found in evaluation.values()]
    assert steps == [OFFLINE, OFFLINE, OFFLINE, OFFLINE, LAST, LAST]
    for name, found in evaluation.items():
        assert found["episodes"] == 4
        assert 0 <= found["interval"][0] <= found["success_rate"] <= found["interval"][1] <= 1
        assert STAGES[name] in " ".join(output.split())
    seeds = set()
    for where, step in (
        (directory, OFFLINE),
        (directory, LAST),
        *((directory / "baselines" / name, evaluation[name]["step"]) for name in BASELINES),
    ):
        record = json.loads((where / "evaluations" / str(step) / "evaluation.json").read_text())
        seeds.add(tuple(episode["seed"] for episode in record["per_episode"]))
    assert len(seeds) == 1  # the same episodes for all


def test_cloning_trains_no_critic(compared: tuple[pathlib.Path, str]) -> None:
    directory, _ = compared
    bc, filtered = (arrays_of(directory / "baselines" / name / str(OFFLINE)) for name in BASELINES[:2])
    offline = arrays_of(directory / "baselines" / "offline_continued" / str(LAST))
    critic = [name for name in bc if ".critic" in name]
    assert critic
    for name in critic:
        # The two runs saw different data and have equal critics, so the critics are still those of the beginning.
        assert np.array_equal(bc[name], filtered[name]), name
    online = [name for name in critic if name.startswith(".critics.online")]
    for name in online:
        assert np.array_equal(bc[name], bc[name.replace(".online", ".target", 1)])
    assert not all(np.array_equal(bc[name], offline[name]) for name in online)
    policy = [name for name in bc if name.startswith(".policy_params")]
    assert not all(np.array_equal(bc[name], filtered[name]) for name in policy)


def test_offline_success_clones_some_windows_and_trains_critics(compared: tuple[pathlib.Path, str]) -> None:
    directory, _ = compared
    lines = [line for line in metrics_of(directory / "baselines" / "offline_success") if "total_loss" in line]
    assert all(line["policy_data_ratio"] > 0 and line["critic_grad_norm"] > 0 for line in lines)
    assert any(line["policy_data_ratio"] < 1 for line in lines)


def test_offline_continued_goes_on_where_the_run_went_online(compared: tuple[pathlib.Path, str]) -> None:
    directory, _ = compared
    lines = [line for line in metrics_of(directory / "baselines" / "offline_continued") if "total_loss" in line]
    assert [line["step"] for line in lines] == list(range(OFFLINE + 1, LAST + 1))
    assert {line["phase"] for line in lines} == {"offline"}
    config = load_config(directory / "baselines" / "offline_continued" / "config.yaml")
    assert (config.training.offline_steps, config.training.online_steps) == (LAST, 0)


def test_it_is_not_resumed_as_something_else(compared: tuple[pathlib.Path, str]) -> None:
    """A refused config does not change config.yaml, to which the error points."""
    directory, _ = compared
    before = (directory / "config.yaml").read_bytes()
    other = apply_config_overrides(load_config(directory / "config.yaml"), {"acrlpd.discount": 0.5})
    with pytest.raises(ConfigError, match="differs from that of"):
        run_experiment(other, RunOptions(resume=True))
    with pytest.raises(ConfigError, match=r"are finished(.|\n)*acrlpd\.discount: 0.99 -> 0.5"):
        run_experiment(other, RunOptions(resume=True, allow_changed=("acrlpd.discount",)))
    assert (directory / "config.yaml").read_bytes() == before


def test_a_baseline_of_another_config_is_not_compared(
    compared: tuple[pathlib.Path, str], tmp_path: pathlib.Path
) -> None:
    """After a kill between the first baseline and the first checkpoint of the run, which alone knew the config."""
    config = apply_config_overrides(config_of(tmp_path), {"evaluation.baselines": ["bc"]})
    shutil.copytree(compared[0] / "baselines" / "bc", run_directory(config) / "baselines" / "bc")
    with pytest.raises(ConfigError, match=r"differs from that of .*baselines/bc/8:\n  seed: 42 -> 7"):
        run_experiment(apply_config_overrides(config, seed=7), RunOptions(resume=True))


def test_a_finished_comparison_may_be_named_by_another_path(
    compared: tuple[pathlib.Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `--resume DIR` does, whose path may be another one than that of the config."""
    directory, _ = compared
    config = load_config(directory / "config.yaml")
    monkeypatch.chdir(directory)
    elsewhere = {"checkpoints.directory": os.path.relpath(config.checkpoints.directory)}
    assert run_experiment(apply_config_overrides(config, elsewhere), RunOptions(resume=True)) == 0


def test_a_baseline_differs_in_nothing_but_what_it_is_for(tmp_path: pathlib.Path) -> None:
    config = apply_config_overrides(config_of(tmp_path), early_stopping_patience=2, eval_frequency=2)
    filtered = baseline_config(config, "bc_success_only", {})
    assert filtered.data.episode_filter == "success"
    assert baseline_config(config, "bc", {}).data == config.data
    filtering = baseline_config(config, "offline_success", {})
    assert (filtering.acrlpd.policy_data, filtering.qchunking.success_ratio) == ("success", 0.5)
    assert filtering.acrlpd.loss_weights == config.acrlpd.loss_weights
    # Cloning stays cloning, whatever the run does.
    changes = {"acrlpd.policy_data": "success", "qchunking.success_ratio": 0.8}
    changes |= {"acrlpd.critic_updates_per_policy_update": 4, "acrlpd.critic_ema_decay": 0.9}
    changed = apply_config_overrides(config, changes)
    for name in ("bc", "bc_success_only"):
        assert baseline_config(changed, name, {}) == baseline_config(config, name, {})
    for name in BASELINES:
        found = baseline_config(config, name, {"final_step": 11})
        assert (found.seed, found.batch_size, found.model, found.env) == (
            config.seed,
            config.batch_size,
            config.model,
            config.env,
        )
        # A baseline makes all of its updates, also if it starts where the run stopped for lack of improvement.
        assert (found.training.early_stopping_patience, found.training.eval_frequency) == (0, 0)
        assert found.training.offline_steps == (11 if name == "offline_continued" else OFFLINE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"evaluation.baselines": ["bc", "offline_success"]},
            "the baseline offline_success cannot be trained: .*all successes.*Or leave it out of evaluation.baselines",
        ),
        (
            {"evaluation.baselines": ["bc"], "acrlpd.policy_data": "success"},
            "acrlpd.policy_data success: the 3 episodes of the data are all successes .* changes nothing",
        ),
    ],
)
def test_data_without_failures_is_refused_before_a_baseline_trains(
    tmp_path: pathlib.Path, changes: dict[str, Any], message: str
) -> None:
    """Only every fourth episode of the fake data is a failure."""
    changes = {"data.max_episodes": 3, "training.online_steps": 0, **changes}
    config = apply_config_overrides(config_of(tmp_path), changes)
    with pytest.raises(ValueError, match=message):
        run_comparison([config], [run_directory(config)], RunOptions())
    assert not list(tmp_path.rglob("baselines"))
