"""Hyperparameters and chunks from which no agent can be made are refused."""

import dataclasses

import jax
import pytest
from agent_helpers import make_config, replace_acrlpd

from acrlpd.config.create_agent import create_agent

KEY = jax.random.key(5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_action_samples": 1}, "learned temperature needs the values"),
        ({"num_action_samples": 0, "learnable_temperature": False}, "num_action_samples must be at least 1"),
    ],
)
def test_impossible_hyperparameters_are_refused(changes, message):
    config = replace_acrlpd(make_config(), **changes)
    with pytest.raises(ValueError, match=message):
        create_agent(config, KEY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"horizon_length": 5}, "the critics see 5 actions, more than the policy's action_horizon 4"),
        ({"action_dim": 4}, "action_dim 4"),
        ({"critic_action_horizon": 4}, "critic_action_horizon 4 exceeds"),
    ],
)
def test_impossible_chunks_are_refused(changes, message):
    config = make_config()
    config = dataclasses.replace(config, qchunking=dataclasses.replace(config.qchunking, **changes))
    with pytest.raises(ValueError, match=message):
        create_agent(config, KEY)
