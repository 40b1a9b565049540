"""The plan's arithmetic against published counts and against every matrix product of the traced step."""

import jax
import jax.numpy as jnp
import pytest
from jaxpr_flops import count_flops
from plan_helpers import batch_spec, trace_agent

from acrlpd.config import apply_config_overrides, get_config
from acrlpd.config.plan.flops import policy_flops, step_flops
from acrlpd.models.families.pi0 import Pi0Config

# Sizes at which neither the context nor a chunk needs padding, since padding is not counted.
TINY = apply_config_overrides(
    get_config("debug"),
    {
        "model.image_resolution": [112, 112],
        "model.image_keys": ["base_0_rgb", "left_wrist_0_rgb"],
        "model.max_token_len": 63,
        "model.action_horizon": 64,
        "acrlpd.sampling_steps": 3,
    },
)


def test_full_size_pi0_matches_the_published_counts():
    policy = policy_flops(Pi0Config())
    assert policy.forward == pytest.approx(4.04e12, rel=0.01)
    assert 3 * policy.forward == pytest.approx(12.11e12, rel=0.01)
    # Published with the state token in every denoising step; here it belongs to the context.
    assert 10 * policy.velocity == pytest.approx(0.386e12, rel=0.02)
    two = policy_flops(Pi0Config(image_keys=("base_0_rgb", "left_wrist_0_rgb")))
    assert 1 - two.forward / policy.forward == pytest.approx(0.32, abs=0.01)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model.pi05": True, "model.max_token_len": 64},
        {"model.paligemma_variant": "dummy_lora", "model.action_expert_variant": "dummy_lora"},
        {"model.type": "state_flow", "model.action_dim": 7},
    ],
)
def test_policy_forward(changes):
    config = apply_config_overrides(TINY, changes)
    agent = trace_agent(config)
    observation, actions = config.model.inputs_spec(1)

    def forward(agent, observation, actions):
        policy = agent.policy()
        return policy.velocity(policy.encode(observation), actions[:, None], jnp.ones((1, 1)))

    counted = count_flops(forward, agent, observation, actions)
    assert policy_flops(config.model).forward == pytest.approx(counted, rel=0.005)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model.pi05": True, "model.max_token_len": 64},
        {"freeze_pi0_backbone": True},
        {"model.paligemma_variant": "dummy_lora", "model.action_expert_variant": "dummy_lora"},
        {"gradient_accumulation_steps": 2},
        {"improvement": "best_of_n"},
        {"improvement": "policy_gradient"},
        {"loss_weights.actor_weight": 0.0},
        {"model.remat_policy": "none"},
        {"model.remat_policy": "dots"},
        {"acrlpd.num_action_samples": 8, "critic.feature_fusion_method": "mlp"},
        {"model.type": "state_flow", "model.action_dim": 7, "acrlpd.num_action_samples": 16},
    ],
)
def test_whole_update(changes):
    config = apply_config_overrides(TINY, changes)
    counted = count_flops(
        lambda agent, batch, key: agent.train_step(batch, key),
        trace_agent(config),
        batch_spec(config),
        jax.eval_shape(lambda: jax.random.key(0)),
    )
    assert step_flops(config).total == pytest.approx(counted / config.batch_size, rel=0.04)
