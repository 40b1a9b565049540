"""For equal noise, everything that acts gives equal actions: what is judged is what is served."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_checkpoints import make_agent, pi0_config, save_run, serve, state_config
from steering import Steering
from toy_agent import NORM_STATS

from acrlpd.agents import Agent
from acrlpd.agents.improvements.distillation import Distillation
from acrlpd.agents.improvements.dsrl import DSRL
from acrlpd.agents.improvements.expo import EXPO
from acrlpd.agents.improvements.sac import SAC
from acrlpd.config import LossWeights, RLTrainConfig
from acrlpd.envs.create import create_env_pool
from acrlpd.evaluation.protocol import EvaluationProtocol
from acrlpd.execution.base import ChunkPolicy, Chunks, Columns
from acrlpd.models.families.gaussian import GaussianPolicyConfig
from acrlpd.policies.acting_model import acting_model
from acrlpd.policies.checkpoint import load_policy, open_checkpoint
from acrlpd.policies.policy import create_policy
from acrlpd.serving.export import export_policy
from acrlpd.serving.serving_policy import load_serving_policy
from acrlpd.training.online import rounds
from acrlpd.training.online.actor import PublishedPolicy, publish

SEEDS = [3, 2**31 + 5]
PROMPTS = ["go left", "go"]
STEP = 20


def pi0_in_the_toy() -> RLTrainConfig:
    """The pi0 of the server's tests, with the names of the toy environment."""
    config = pi0_config()
    repack = dataclasses.replace(config.data.repack, base_0_rgb="observation.images.side")
    return dataclasses.replace(config, data=dataclasses.replace(config.data, repack=repack))


def steered() -> RLTrainConfig:
    """An improvement whose own network changes the candidates: it acts with the policy, wherever the policy acts."""
    return state_config(improvement=Steering())


def distilled() -> RLTrainConfig:
    """The one-step policy acts in place of the flow policy."""
    return state_config(improvement=Distillation(hidden_dims=(16,)))


def edited() -> RLTrainConfig:
    """Half of the candidates are edited."""
    hyperparams = dataclasses.replace(state_config().acrlpd, learnable_temperature=False)
    return state_config(improvement=EXPO(hidden_dims=(16,)), acrlpd=hyperparams)


def noise_steered() -> RLTrainConfig:
    """A frozen policy whose noise an actor chooses."""
    losses = LossWeights(actor_weight=1.0, bc_weight=0.0)
    hyperparams = dataclasses.replace(state_config().acrlpd, learnable_temperature=False, loss_weights=losses)
    return state_config(improvement=DSRL(hidden_dims=(16,)), acrlpd=hyperparams)


def squashed() -> RLTrainConfig:
    """A policy that is no flow, with SAC."""
    model = GaussianPolicyConfig(state_dim=3, action_dim=2, action_horizon=4, hidden_dims=(16,))
    hyperparams = dataclasses.replace(state_config().acrlpd, learnable_temperature=False)
    data = dataclasses.replace(state_config().data, use_quantile_norm=False)
    return state_config(model=model, improvement=SAC(), acrlpd=hyperparams, data=data)


def observations_of(config: RLTrainConfig) -> Columns:
    rng = np.random.default_rng(0)
    columns = {"observation.state": rng.standard_normal((2, 3)).astype(np.float32)}
    if config.model.image_keys:
        columns["observation.images.side"] = rng.integers(0, 256, (2, 16, 24, 3), np.uint8)
    return columns


def by_evaluation(config: RLTrainConfig, agent: Agent) -> ChunkPolicy:
    with EvaluationProtocol(config, NORM_STATS, num_workers=0) as protocol:
        return protocol.policy(agent)


def by_a_synchronous_round(
    config: RLTrainConfig, agent: Agent, directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> ChunkPolicy:
    asked: list[ChunkPolicy] = []
    monkeypatch.setattr(rounds, "joint_rollouts", lambda envs, policy, plans, **_: asked.append(policy) or ())
    config = dataclasses.replace(config, online=dataclasses.replace(config.online, episodes_per_round=1))
    with create_env_pool(config, num_workers=0) as envs:
        round_player = rounds.RoundPlayer(config, envs, rounds.open_replay(directory, config, envs.spec))
        player = rounds.SynchronousPlayer(config, round_player, NORM_STATS)
        player.update_policy(make_agent(config, 9), STEP - 1)
        player.round(0)
        player.update_policy(agent, STEP)
        assert player.round(1).policy_step == STEP
    return asked[-1]


def by_several_runs(config: RLTrainConfig, agent: Agent) -> ChunkPolicy:
    """The agent is the second of two runs that act in one call."""
    models = {
        i: acting_model(a, average=config.acts_with_average) for i, a in enumerate((make_agent(config, 9), agent))
    }
    policy = create_policy(models[0], config, NORM_STATS).with_models(models, 2)

    def act(observations: Columns, prompts: Sequence[str], seeds: Sequence[int]) -> Chunks:
        twice = {name: np.concatenate([values, values]) for name, values in observations.items()}
        chunks = policy(twice, [*prompts, *prompts], [*seeds, *seeds])
        return Chunks(chunks.actions[2:], {name: values[2:] for name, values in chunks.values.items()})

    return act


def by_the_actor(config: RLTrainConfig, agent: Agent, directory: pathlib.Path) -> ChunkPolicy:
    published = PublishedPolicy(directory, config, NORM_STATS)
    publish(directory, acting_model(make_agent(config, 9), average=config.acts_with_average), STEP - 1)
    assert published.newest()[1] == STEP - 1
    publish(directory, acting_model(agent, average=config.acts_with_average), STEP)
    policy, step = published.newest()
    assert step == STEP
    return policy


def replies(policy: Any, config: RLTrainConfig, observations: Columns) -> list[dict[str, Any]]:
    """What the server answers to the same observations, as clients send them."""
    requests = []
    for row, (prompt, seed) in enumerate(zip(PROMPTS, SEEDS, strict=True)):
        message: dict[str, Any] = {"state": observations["observation.state"][row], "seed": seed}
        if config.model.image_keys:
            image = observations["observation.images.side"][row]
            message |= {"images": {"base_0_rgb": image}, "prompt": prompt}
        requests.append(policy.prepare(message))
    return policy.infer(requests)


@pytest.mark.parametrize(
    "make_config",
    [
        state_config,
        pytest.param(steered, marks=pytest.mark.slow),  # `noise_steered` has a noise actor, too
        pi0_in_the_toy,
        pytest.param(distilled, marks=pytest.mark.slow),  # `edited` has networks of its improvement, too
        edited,
        noise_steered,
        squashed,
    ],
)
def test_everything_that_acts_gives_equal_actions(
    make_config: Callable[[], RLTrainConfig], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    agent = make_agent(config)
    observations = observations_of(config)
    run = save_run(tmp_path / "run", config, {STEP: agent})
    export_policy(run, tmp_path / "export", critics="all")
    policies = {
        "evaluation": by_evaluation(config, agent),
        "round": by_a_synchronous_round(config, agent, tmp_path, monkeypatch),
        "several runs": by_several_runs(config, agent),
        "actor": by_the_actor(config, agent, tmp_path),
        "run": load_policy(open_checkpoint(run)),
        "export": load_policy(open_checkpoint(tmp_path / "export")),
    }
    chunks = {name: policy(observations, PROMPTS, SEEDS) for name, policy in policies.items()}
    servers = {
        "server of the agent": serve(
            acting_model(agent, average=config.acts_with_average),
            config,
            NORM_STATS,
            best_of_n=4,
            num_steps=(2,),
            max_batch_size=2,
        ),
        "server of the run": load_serving_policy(open_checkpoint(run), max_batch_size=2),
        "server of the export": load_serving_policy(open_checkpoint(tmp_path / "export"), max_batch_size=2),
    }
    answers = {name: replies(server, config, observations) for name, server in servers.items()}
    expected = chunks["evaluation"]
    assert expected.actions.shape == (2, 4, 2) and np.ptp(expected.actions) > 0
    for name, found in chunks.items():
        np.testing.assert_allclose(found.actions, expected.actions, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(found.values["q"], expected.values["q"], atol=1e-5, err_msg=name)
    for name, answer in answers.items():
        for row, reply in enumerate(answer):
            np.testing.assert_allclose(reply["actions"], expected.actions[row], atol=1e-5, err_msg=name)
            assert reply["best_of_n"]["q_value"] == pytest.approx(expected.values["q"][row], abs=1e-5), name
    # The comparison can fail: another agent acts differently.
    other = by_evaluation(config, make_agent(config, 9))(observations, PROMPTS, SEEDS)
    assert np.abs(other.actions - expected.actions).max() > 1e-2


def test_the_network_of_an_improvement_changes_the_actions() -> None:
    """Without the network's parameters the comparison above would compare nothing of it."""
    config = steered()
    policy = create_policy(acting_model(make_agent(config), average=config.acts_with_average), config, NORM_STATS)
    critics = policy.model.critics
    assert critics is not None
    still = critics.replace(improvement=jax.tree.map(jnp.zeros_like, critics.improvement))
    unsteered = dataclasses.replace(policy, model=policy.model.replace(critics=still))
    arguments = (observations_of(config), PROMPTS, SEEDS)
    assert np.abs(policy(*arguments).actions - unsteered(*arguments).actions).max() > 1e-2
