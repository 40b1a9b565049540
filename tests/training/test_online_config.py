"""What is refused before an online phase or a comparison begins, and the flag for the actor process."""

import logging
import pathlib
from typing import Any

import pytest
from toy_env import make_toy
from training_helpers import online_config

from acrlpd.cli.main import main
from acrlpd.config import save_config, validate_config
from acrlpd.config.command_line import NoOptions, parse_config_args
from acrlpd.data.sources.source import Feature
from acrlpd.envs import EnvSpec, register_env
from acrlpd.envs.create import create_env_pool
from acrlpd.training.train_runs import warn_about_image_size

CLONING = {"acrlpd__loss_weights__critic_weight": 0.0, "online_steps": 0, "evaluation__best_of_n": 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env__id": None}, "the 15 online steps need an environment: set env.id, or online_steps 0"),
        ({"online__offline_ratio": 1.5}, "online.offline_ratio must lie in [0, 1]; found 1.5"),
        ({"online__offline_ratio": -0.1}, "online.offline_ratio must lie in [0, 1]; found -0.1"),
        ({"online__update_to_data_ratio": 0.0}, "online.update_to_data_ratio must be above 0; found 0.0"),
        ({"online__episodes_per_round": 0}, "online.episodes_per_round must be at least 1; found 0"),
        ({"online__best_of_n": 0}, "online.best_of_n must be at least 1; found 0"),
        ({"online__actor_refresh_steps": 0}, "online.actor_refresh_steps must be at least 1; found 0"),
        ({"online__critic_warmup_steps": -1}, "online.critic_warmup_steps must be at least 0; found -1"),
        ({"online__start_steps": -1}, "online.start_steps must be at least 0; found -1"),
        ({"online__final_bc_weight": -1.0}, "online.final_bc_weight must be at least 0; found -1.0"),
        ({"online__final_actor_weight": 2.0}, "acrlpd.loss_weights.actor_weight 0 has no improvement"),
        ({"env__num_envs": 0}, "env.num_envs must be at least 1; found 0"),
        ({"env__max_episode_steps": 0}, "env.max_episode_steps must be at least 1; found 0"),
        ({"env__timeout_s": 0.0}, "env.timeout_s must be above 0; found 0.0"),
        ({"data__repack__actions": ["arm", "hand"]}, "actions in one column of the dataset; data.repack.actions names"),
        (
            {"env__id": None, "online_steps": 0, "evaluation__baselines": ["bc"]},
            "evaluation.baselines bc are judged in an environment: set env.id",
        ),
        ({"evaluation__baselines": ["bc", "bc"]}, "names a baseline twice"),
        (
            {"online_steps": 0, "evaluation__baselines": ["offline_continued"]},
            "needs both training.offline_steps and training.online_steps; found 13 and 0",
        ),
        (
            {"offline_steps": 0, "evaluation__baselines": ["offline_continued"]},
            "needs both training.offline_steps and training.online_steps; found 0 and 15",
        ),
        (CLONING | {"acrlpd__loss_weights__actor_weight": 1.0}, "which a policy improvement needs"),
        (
            CLONING | {"acrlpd__loss_weights__actor_weight": 1.0, "improvement": "best_of_n"},
            "which a policy improvement needs",
        ),
        (CLONING | {"online_steps": 5}, "cloning one's own episodes improves nothing"),
        (CLONING | {"evaluation__best_of_n": None}, "could choose among 2 candidates: set evaluation.best_of_n 1"),
        (CLONING | {"evaluation__best_of_n": 4}, "could choose among 4 candidates: set evaluation.best_of_n 1"),
        (CLONING | {"evaluation__robustness": True}, "set evaluation.best_of_n_values 1"),
        (CLONING | {"acrlpd__critic_updates_per_policy_update": 2}, "set acrlpd.critic_updates_per_policy_update 1"),
        (CLONING | {"acrlpd__bc_importance_weighting": True}, "which bc_importance_weighting needs"),
        (CLONING | {"acrlpd__policy_data": "advantage"}, "which acrlpd.policy_data advantage needs"),
        (
            CLONING | {"evaluation__baselines": ["offline_success"]},
            "the baseline offline_success is RL with critics, and acrlpd.loss_weights.critic_weight 0 trains none",
        ),
        (
            {"acrlpd__policy_data": "success", "evaluation__baselines": ["offline_success"]},
            "makes the run itself what the baseline offline_success is",
        ),
        ({"qchunking__success_ratio": 1.0}, "qchunking.success_ratio must lie in (0, 1); found 1.0"),
        ({"acrlpd__advantage_quantile": 1.0}, "acrlpd.advantage_quantile must lie in [0, 1); found 1.0"),
        (CLONING | {"acrlpd__learnable_temperature": True}, "set acrlpd.learnable_temperature false"),
        (CLONING | {"acrlpd__critic_warmup_steps": 5}, "set acrlpd.critic_warmup_steps 0"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: pathlib.Path, changes: dict[str, Any], message: str) -> None:
    validation = validate_config(online_config(tmp_path, **changes), ready_to_train=True)
    assert any(message in error for error in validation.errors), validation


def test_what_works_is_not_refused(tmp_path: pathlib.Path) -> None:
    everything = ["bc", "bc_success_only", "offline_success", "offline_continued"]
    for config in (online_config(tmp_path, evaluation__baselines=everything), online_config(tmp_path, **CLONING)):
        assert validate_config(config, ready_to_train=True).errors == ()


def test_the_command_ends_with_one_message(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_config(
        online_config(tmp_path, env__id=None, offline_steps=0, online__offline_ratio=2.0), tmp_path / "run.yaml"
    )
    assert main(["train", "--config", str(tmp_path / "run.yaml")]) == 2
    error = capsys.readouterr().err
    assert "this config cannot run (2 errors)" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("flags", "expected"),
    [((), False), (("--async",), True), (("--online.async-actor",), True), (("--online.async_actor",), True)],
)
def test_the_flag_for_an_actor_process(flags: tuple[str, ...], expected: bool) -> None:
    config, _ = parse_config_args(NoOptions, ["--config", "quickstart", *flags])
    assert config.online.async_actor is expected


def test_environments_render_what_the_data_has(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    sizes = []

    def make(name: str, *, image_size: tuple[int, int], **options: Any) -> Any:
        sizes.append(image_size)
        return make_toy(name, **options)

    register_env("asking_toy", make)
    config = online_config(tmp_path, env__id="asking_toy", env__image_size=[48, 64])
    create_env_pool(config, num_workers=0).close()
    assert set(sizes) == {(48, 64)}

    features = {"observation.images.side": Feature("video", (48, 64, 3)), "observation.state": Feature("float32", (3,))}
    spec = EnvSpec("toy", features, 2, "action", 10, None)
    with caplog.at_level(logging.WARNING):
        warn_about_image_size(features, spec)
        assert not caplog.messages
        warn_about_image_size({"observation.images.side": Feature("video", (224, 224, 3))}, spec)
    (message,) = caplog.messages
    assert "environment 'toy' renders 48 x 64, the dataset has 224 x 224" in message
