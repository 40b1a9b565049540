"""A tiny pi0-FAST learns a small dataset by heart and acts, with critics, from a checkpoint and from an export."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from acrlpd.agents import train_step
from acrlpd.batch import Batch
from acrlpd.config import apply_config_overrides, get_config
from acrlpd.config.create_agent import create_agent
from acrlpd.config.plan.flops import batch_spec
from acrlpd.data.pipeline.transforms import create_policy_transforms
from acrlpd.models.fast_tokenizer import fit_fast_tokenizer
from acrlpd.models.observation import Observation
from acrlpd.policies.acting_model import acting_model
from acrlpd.policies.checkpoint import open_checkpoint
from acrlpd.policies.policy import create_policy
from acrlpd.runs.checkpoint_layout import CheckpointError
from acrlpd.serving.export import export_policy
from acrlpd.serving.serving_policy import load_serving_policy
from acrlpd.training.checkpoints.metadata import read_assets
from acrlpd.training.checkpoints.writer import CheckpointWriter

SAMPLES, HORIZON, DIM = 6, 4, 2
UPDATES = 60
ROUNDING = 0.05 * np.sqrt(HORIZON) + 1e-5  # the most by which FAST changes an action


@pytest.fixture(scope="module")
def data():
    """States and chunks; the last two samples have one state and two chunks."""
    rng = np.random.default_rng(0)
    states = rng.uniform(-1, 1, (SAMPLES, DIM)).astype(np.float32)
    states[-1] = states[-2]
    return states, np.cumsum(rng.normal(0, 0.4, (SAMPLES, HORIZON, DIM)), axis=1).astype(np.float32)


@pytest.fixture(scope="module")
def config(tmp_path_factory, data):
    """No camera: the policy reads the state in its prompt. Critics choose among the candidates."""
    tokenizer = tmp_path_factory.mktemp("fast") / "tokenizer"
    fit_fast_tokenizer(data[1], vocab_size=300).save(tokenizer)
    changes = {
        "batch_size": SAMPLES,
        "model.image_keys": (),
        "model.fast_tokenizer": str(tokenizer),
        "model.state_dim": DIM,
        "model.action_dim": DIM,
        "model.action_horizon": HORIZON,
        "qchunking.action_dim": DIM,
        "qchunking.horizon_length": HORIZON,
        "model.max_token_len": 46,
        "model.max_action_tokens": 18,
        "model.temperature": 1.0,
        "data.repack.base_0_rgb": None,
        "data.default_prompt": "go",
        "backup": "implicit_value",
        "acrlpd.loss_weights.bc_weight": 1.0,
        "acrlpd.ema_decay": None,
        "actor_lr_schedule": "constant",
        "actor_lr_schedule.peak_lr": 3e-3,
    }
    return apply_config_overrides(get_config("debug_fast"), changes)


@pytest.fixture(scope="module")
def batch(config, data) -> Batch:
    """What the data layer makes of the samples, all of which are valid and end the task."""
    states, actions = data
    inputs = create_policy_transforms(config).model_inputs_with(None)
    made = inputs({"state": states, "actions": actions})
    seen = {name: made[name] for name in ("state", "tokenized_prompt", "tokenized_prompt_mask", "action_tokens")}
    observation = Observation(images={}, image_masks={}, **seen)
    ones = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), batch_spec(config))
    return dataclasses.replace(ones, observations=observation, next_observations=observation, actions=actions)


@pytest.fixture(scope="module")
def cloned(config, batch):
    """The policy's parameters after cloning all samples in every update, and its losses on the way."""
    graphdef, params = nnx.split(config.model.create(jax.random.key(0)))
    optimizer = optax.adam(6e-3)

    @jax.jit
    def clone(params, batch):
        def loss(params):
            policy = nnx.merge(graphdef, params)
            return jnp.mean(policy.compute_loss(jax.random.key(0), batch.observations, batch.actions))

        def update(carry, _):
            params, state = carry
            value, grads = jax.value_and_grad(loss)(params)
            changes, state = optimizer.update(grads, state)
            return (optax.apply_updates(params, changes), state), value

        (params, _), losses = jax.lax.scan(update, (params, optimizer.init(params)), length=UPDATES)
        return params, losses

    params, losses = clone(params, batch)
    return nnx.to_pure_dict(params), np.asarray(losses)


@pytest.fixture(scope="module")
def agent(config, cloned):
    return create_agent(config, jax.random.key(0), policy_params=cloned[0])


def act(policy, states, seeds=range(SAMPLES)):
    return policy({"observation.state": states}, ["go"] * SAMPLES, list(seeds))


def test_it_learns_chunks_by_heart_and_acts(config, data, cloned, agent):
    states, actions = data
    losses = cloned[1]
    assert losses[0] > 3.0
    assert losses[-1] < 0.2
    policy = agent.policy()
    policy.config = dataclasses.replace(policy.config, temperature=0.0)
    greedy = acting_model(agent, average=False).replace(policy_def=nnx.split(policy)[0])
    found = act(create_policy(greedy, config, None, best_of_n=1), states).actions
    assert np.abs(found - actions)[:-2].max() <= ROUNDING


def test_chunks_are_drawn_from_what_was_learned_and_follow_from_the_noise(config, data, agent):
    policy = create_policy(acting_model(agent, average=False), config, None, best_of_n=2)
    states, (first, second) = np.repeat(data[0][-1:], SAMPLES, axis=0), data[1][-2:]
    drawn = [act(policy, states, range(start, start + SAMPLES)) for start in (0, SAMPLES)]
    again = act(policy, states, reversed(range(SAMPLES)))
    np.testing.assert_array_equal(again.actions[::-1], drawn[0].actions)
    spread = np.concatenate([chunks.values["action_std"] for chunks in drawn])
    assert 0 < (spread > 0).sum() < len(spread)  # two candidates are sometimes equal
    nearest = [np.abs(np.concatenate([c.actions for c in drawn]) - chunk).max(axis=(1, 2)) for chunk in (first, second)]
    assert (np.min(nearest, axis=0) <= ROUNDING).sum() > SAMPLES


def test_an_update_of_policy_and_critics(batch, agent):
    """Advantage-weighted cloning with sampled candidates, and targets of a value network."""
    updated, info = train_step(jax.tree.map(jnp.copy, agent), batch, jax.random.key(1))
    for name in ("bc_loss", "actor_loss", "critic_loss", "backup_loss", "advantage_std"):
        assert np.isfinite(float(info[name])), name
    assert 0 < float(info["bc_loss"]) < 0.3  # the loss of a policy that knows these chunks
    table = [tree.policy_params["PaliGemma"]["llm"]["embedder"]["input_embedding"][...] for tree in (agent, updated)]
    assert np.abs(table[0] - table[1]).max() > 0


def test_a_checkpoint_and_an_export_carry_their_tokenizer(tmp_path, caplog, config, data, agent):
    """The export is served, and each client gets the chunk of its seed."""
    states = data[0]
    expected = act(create_policy(acting_model(agent, average=False), config, None, best_of_n=2), states).actions
    moved = tmp_path / "tokenizer"
    shutil.copytree(config.model.fast_tokenizer, moved)
    config = apply_config_overrides(config, {"model.fast_tokenizer": str(moved)})
    writer = CheckpointWriter(tmp_path / "run", config, read_assets(config))
    (tmp_path / "run").mkdir()
    writer.save(agent, 7, rng=jax.random.key(0), state={})
    writer.close()
    shutil.rmtree(moved)
    assert open_checkpoint(tmp_path / "run").rl_config.model.fast_tokenizer.startswith(str(tmp_path / "run"))
    export_policy(tmp_path / "run", tmp_path / "export")
    exported = open_checkpoint(tmp_path / "export")
    assert exported.rl_config.model.fast_tokenizer == str(tmp_path / "export" / "assets" / "fast_tokenizer")
    served = load_serving_policy(exported, best_of_n=2)
    caplog.clear()
    served.warm_up()
    assert not caplog.records  # the made-up observations of the warm-up are not reported
    for seed, state in enumerate(states):
        [reply] = served.infer([served.prepare({"state": state, "prompt": "go", "seed": seed})])
        np.testing.assert_allclose(reply["actions"], expected[seed], atol=1e-6)
    readme = (tmp_path / "export" / "README.md").read_text()
    assert "fast_tokenizer_path" in readme
    assert "one sample, token by token, no critics" in readme
    file = tmp_path / "export" / "assets" / "fast_tokenizer" / "tokenizer.json"
    file.write_text(file.read_text().replace("0", "1", 1))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json has changed since it was written"):
        open_checkpoint(tmp_path / "export").load_norm_stats()
