"""The agent with pi0 and pi0.5: full, LoRA, frozen backbone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_helpers import (
    QUICK,
    assert_trees_identical,
    compute_part,
    make_batch,
    make_config,
    quick_jit,
    random_like,
    tiny_pi0,
)
from flax import nnx

from acrlpd.agents import train_step
from acrlpd.agents.improvements.distillation import Distillation
from acrlpd.agents.improvements.dsrl import DSRL
from acrlpd.agents.improvements.expo import EXPO
from acrlpd.config import LossWeights
from acrlpd.config.create_agent import create_agent
from acrlpd.config.plan.flops import count_flops
from acrlpd.models.policy import Context, Features

KEY = jax.random.key(1)
LORA = {"paligemma_variant": "dummy_lora", "action_expert_variant": "dummy_lora"}


def shapes_of(config):
    return jax.eval_shape(lambda key: create_agent(config, key), KEY)


def build(config):
    agent = random_like(shapes_of(config), scale=0.1)
    return agent.replace(
        ema_params=jax.tree.map(jnp.copy, agent.policy_params),
        policy_opt_state=agent.policy_optimizer.tx.init(agent.policy_params),
        critic_opt_state=agent.critic_optimizer.tx.init(agent.critics.online),
        temperature_opt_state=agent.temperature_optimizer.tx.init(agent.temperature_params),
        loss_weights=jax.tree.map(lambda w: jnp.asarray(w, jnp.float32), config.acrlpd.loss_weights),
    )


def paths(state):
    return {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(state)}


def is_action_expert(path):
    return ("llm" in path and "_1" in path) or not path.startswith("PaliGemma")


CONFIGS = {
    "pi0": make_config(model=tiny_pi0()),
    "pi05": make_config(model=tiny_pi0(pi05=True, max_token_len=6)),
    "pi0_camera": make_config(model=tiny_pi0(image_keys=("base_0_rgb",))),
    "pi0_frozen": make_config(model=tiny_pi0(), freeze_pi0_backbone=True, critic={"pooling": "attention"}),
    "pi05_lora": make_config(model=tiny_pi0(pi05=True, max_token_len=6, **LORA)),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("pi0", marks=pytest.mark.slow),
        pytest.param("pi05", marks=pytest.mark.slow),
        pytest.param("pi0_camera", marks=pytest.mark.slow),
        "pi0_frozen",
        "pi05_lora",
    ],
)
def test_updates(name):
    """Everything that should learn learns, and what is frozen does not move by a bit."""
    config = CONFIGS[name]
    agent, batch = build(config), make_batch(config, 4)
    old = jax.tree.map(jnp.copy, agent)
    step = train_step.lower(agent, batch, KEY).compile(compiler_options=QUICK)
    for i in range(2):
        agent, info = step(agent, batch, jax.random.key(i))
    assert all(np.isfinite(value) for value in info.values())
    assert int(agent.skipped_updates) == 0
    assert_trees_identical(agent.frozen_params, old.frozen_params)
    moved = {
        "/".join(map(str, path))
        for (path, new), (_, before) in zip(
            nnx.to_flat_state(agent.policy_params), nnx.to_flat_state(old.policy_params), strict=True
        )
        if np.any(np.asarray(new[...]) != np.asarray(before[...]))
    }
    # Without a camera the image encoder has nothing to learn from; expert 0's last norm feeds critics alone.
    idle = {"PaliGemma/llm/final_norm/scale"}
    if not config.model.image_keys:
        idle |= {path for path in paths(old.policy_params) if "/img/" in path}
    assert moved == paths(old.policy_params) - idle

    # Critics alone do not train the policy, whatever its features are.
    weights = jax.tree.map(jnp.float32, LossWeights(actor_weight=0.0, bc_weight=0.0))
    agent, info = step(agent.replace(loss_weights=weights), batch, KEY)
    assert float(info["policy_grad_norm"]) == 0.0
    assert float(info["critic_grad_norm"]) > 0.0


@pytest.mark.parametrize("name", CONFIGS)
def test_layout_of_the_state(name):
    """Frozen parameters are bfloat16 and have neither optimizer state nor average; the rest is float32."""
    config = CONFIGS[name]
    agent = shapes_of(config)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(agent.frozen_params))
    trainable = (agent.policy_params, agent.ema_params, agent.critics)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(trainable))
    adam = agent.policy_opt_state[1][0]
    names = paths(agent.policy_params)
    assert paths(agent.ema_params) == paths(adam.mu) == paths(adam.nu) == names
    frozen = paths(agent.frozen_params)
    assert not names & frozen
    whole = jax.eval_shape(lambda key: nnx.state(config.model.create(key)), KEY)
    assert names | frozen == paths(whole)
    if name == "pi0_frozen":
        assert frozen and not any(is_action_expert(path) for path in frozen)
        assert any(path.startswith("PaliGemma/img") for path in frozen)
    elif name == "pi05_lora":
        assert frozen and all("llm" in path and "lora" not in path for path in frozen)
    else:
        assert not frozen
    assert paths(agent.served_params()) == paths(whole)


def test_critic_gradient_reaches_the_policy_only_when_configured():
    def largest_gradient(config):
        agent, batch = build(config), make_batch(config, 2)

        def loss(params, agent, batch):
            return compute_part(agent.replace(policy_params=params), "critic", batch, KEY)[0]

        grads = quick_jit(jax.grad(loss))(agent.policy_params, agent, batch)
        return {"/".join(map(str, path)): float(jnp.max(jnp.abs(leaf[...]))) for path, leaf in nnx.to_flat_state(grads)}

    make = functools.partial(make_config, model=tiny_pi0(), num_action_samples=2)
    assert max(largest_gradient(make()).values()) == 0.0
    grads = largest_gradient(make(critic_gradient_to_policy=True))
    assert grads["PaliGemma/llm/layers/mlp/linear"] > 0
    # Through the features alone: not through the action expert, and not through the targets.
    assert all(value == 0.0 for path, value in grads.items() if is_action_expert(path))


@pytest.mark.parametrize("name", ["pi0_camera", "pi0_frozen", "pi05_lora"])
def test_nothing_is_computed_twice(name):
    """The joint step costs a cloning step, one more prefix, candidates at both ends, and the critics."""
    config = dataclasses.replace(CONFIGS[name], critic=dataclasses.replace(CONFIGS[name].critic, pooling="mean"))
    agent = shapes_of(config)
    batch = jax.eval_shape(lambda: make_batch(config, 4))
    noise = jax.ShapeDtypeStruct((4, 4, config.model.action_horizon, config.model.action_dim), jnp.float32)

    def clone(agent, batch):
        def loss(params):
            policy = agent.replace(policy_params=params).policy()
            context = policy.encode(policy.preprocess(KEY, batch.observations, train=True))
            return jnp.mean(policy.flow_matching_loss(context, batch.actions, batch.actions, batch.valid[:, 0]))

        return jax.grad(loss)(agent.policy_params)

    def encode(agent, batch):
        policy = agent.policy()
        return policy.encode(policy.preprocess(None, batch.next_observations, train=False))

    def candidates(agent, context, noise):
        return agent.policy().denoise(context, noise, num_steps=config.acrlpd.sampling_steps)

    context = jax.eval_shape(encode, agent, batch)
    parts = count_flops(clone, agent, batch).total() + count_flops(encode, agent, batch).total()
    parts += 2 * count_flops(candidates, agent, context, noise).total()
    joint = count_flops(lambda agent, batch: agent.train_step(batch, KEY), agent, batch).total()
    assert parts < joint < 1.01 * parts  # the critics are that small


def test_weights_to_start_from():
    config = CONFIGS["pi0"]
    kernel = np.full((8, 64), 0.5, np.float32)

    def create(params):
        return create_agent(config, KEY, policy_params=params)

    given = {"action_in_proj": {"kernel": kernel}}
    params = nnx.to_pure_dict(jax.eval_shape(create, given).policy_params)
    assert params["action_in_proj"]["kernel"].shape == (8, 64)
    with pytest.raises(ValueError, match="nobody/kernel, which the policy does not have"):
        jax.eval_shape(create, {"nobody": {"kernel": kernel}})
    with pytest.raises(ValueError, match=r"action_in_proj/kernel must have shape \(8, 64\); found \(2, 2\)"):
        jax.eval_shape(create, {"action_in_proj": {"kernel": np.zeros((2, 2), np.float32)}})


def test_features_do_not_see_padding():
    """What critics are given of a prompt is the same whatever lies behind its end."""
    config = make_config(model=tiny_pi0(), critic={"pooling": "attention"})
    agent, observation = build(config), make_batch(config, 4).observations
    prompt, mask = observation.tokenized_prompt, observation.tokenized_prompt_mask
    assert not mask.all()

    def read(agent, seen, prompt):
        features = agent.policy().encode(seen.replace(tokenized_prompt=prompt)).features
        return features.mean(), agent.critics.online_ensemble.reader(features, seen)

    features = quick_jit(read)
    expected = features(agent, observation, prompt)
    unpadded = features(agent, observation, jnp.where(mask, prompt, 0))
    others = features(agent, observation, jnp.where(mask, 0, prompt))
    for with_zeros, with_noise, other in zip(unpadded, expected, others, strict=True):
        np.testing.assert_allclose(with_zeros, with_noise, rtol=1e-5, atol=1e-6)
        assert not np.allclose(other, with_noise)


def test_only_what_is_seen_now_is_augmented_and_only_where_the_config_says():
    """The value of logged chunks depends on the key through their images alone; targets have clean images always."""
    config = CONFIGS["pi0_camera"]
    plain = dataclasses.replace(config, data=dataclasses.replace(config.data, augment_images=False))
    batch = make_batch(config, 4, all_valid=True)
    loss = quick_jit(lambda agent, batch, key: compute_part(agent, "critic", batch, key)[1])
    augmented, clean = ([loss(build(c), batch, jax.random.key(i)) for i in range(2)] for c in (config, plain))
    assert float(clean[0]["q_mean"]) == float(clean[1]["q_mean"])
    assert len({float(info["q_mean"]) for info in (*augmented, clean[0])}) == 3
    for found, expected in zip(augmented, clean, strict=True):
        np.testing.assert_allclose(found["target_q_mean"], expected["target_q_mean"], rtol=1e-6)


def contexts_of(agent):
    """Two contexts of two observations with one token each."""
    tokens = np.random.default_rng(0).normal(size=(2, 2, 1, agent.policy().feature_dim)).astype(np.float32)
    return [Context(Features(jnp.asarray(seen), jnp.ones(2, jnp.int32)), None) for seen in tokens]


def test_the_one_step_policy_reads_the_features_of_pi0():
    config = make_config(model=tiny_pi0(), improvement=Distillation(hidden_dims=(16,)))
    agent, batch = build(config), make_batch(config, 2)
    network, noise = agent.networks().improvement, jnp.ones((2, 1, 4, 8))
    chunks = [network(context, batch.observations, noise) for context in contexts_of(agent)]
    assert chunks[0].shape == noise.shape
    assert np.abs(chunks[0] - chunks[1]).max() > 1e-3
    _, info = jax.eval_shape(train_step, agent, batch, KEY)  # the whole update fits together
    assert "improvement_grad_norm" in info


@pytest.mark.parametrize("improvement", [EXPO(hidden_dims=(16,)), DSRL(hidden_dims=(16,), noise_rows="all")])
def test_other_networks_of_improvements_read_the_features_of_pi0_too(improvement):
    losses = LossWeights(actor_weight=1.0, bc_weight=0.0)
    hyperparams = {"learnable_temperature": False, "loss_weights": losses}
    config = make_config(model=tiny_pi0(), improvement=improvement, **hyperparams)
    agent, batch = build(config), make_batch(config, 2)
    candidates = [
        improvement.propose(agent.networks(), context, batch.observations, jnp.ones((2, 2, 4, 8)), lambda x: x)
        for context in contexts_of(agent)
    ]
    assert np.abs(candidates[0] - candidates[1]).max() > 1e-4
    _, info = jax.eval_shape(train_step, agent, batch, KEY)
    assert "improvement_grad_norm" in info
