"""A user's own policy improvement: one class outside of the project, with a network of its own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_helpers import assert_trees_close, choose, compute_part, make_batch, make_config, quick_call
from flax import nnx

from acrlpd.agents import train_step
from acrlpd.agents.improvements.base import Improvement
from acrlpd.choice import kind_name
from acrlpd.config import apply_config_overrides, config_to_yaml, get_config
from acrlpd.config.create_agent import create_agent
from acrlpd.config.yaml_files import parse_config

KEY = jax.random.key(0)


@dataclasses.dataclass(frozen=True)
class EditActions(Improvement):
    """A small network shifts every candidate; the shift learns to raise the critics' values."""

    reach: float = 0.1

    def create_networks(self, policy, algorithm, critic, rngs):
        return nnx.Linear(policy.action_dim, policy.action_dim, rngs=rngs)

    def propose(self, networks, context, observation, noise, denoise):
        return self._edited(networks.improvement, denoise(noise))

    def weigh(self, view):
        return dataclasses.replace(super().weigh(view), kept={"actions": view.candidates.actions})

    def losses(self, view, weights):
        # The candidates are edited ones already, and carry no gradient: edit the logged actions instead.
        edited = self._edited(view.networks.improvement, view.batch.actions[:, None])
        return -view.values(edited)[:, 0]

    def metrics(self, weights):
        return {"edit_spread": jnp.std(weights.kept["actions"])}

    def _edited(self, network, actions):
        return actions + self.reach * jnp.tanh(network(actions))


@pytest.fixture(scope="module")
def config():
    return make_config(improvement=EditActions(reach=0.3))


@pytest.fixture(scope="module")
def updated(config):
    agent = jax.jit(create_agent, static_argnums=0)(config, KEY)
    before = jax.tree.map(jnp.copy, agent)
    batch = make_batch(config, 8)
    after, info = quick_call(train_step, agent, batch, KEY)
    return before, after, info, batch


def test_its_network_learns_and_its_metrics_are_reported(updated):
    before, after, info, _ = updated
    changed = jax.tree.map(lambda a, b: bool(np.any(a != b)), before.improvement.params, after.improvement.params)
    assert all(jax.tree.leaves(changed)) and jax.tree.leaves(changed)
    assert float(info["edit_spread"]) > 0 and float(info["improvement_grad_norm"]) > 0
    assert int(after.skipped_updates) == 0


def test_acting_and_targets_use_what_it_proposes(config, updated):
    agent, batch = updated[0], updated[3]
    plain = agent.replace(algorithm=dataclasses.replace(agent.algorithm, improvement=EditActions(reach=0.0)))

    def of(agent):
        return choose(agent, KEY, batch.observations).candidates, compute_part(agent, "critic", batch, KEY)[0]

    (edited, loss), (own, own_loss) = jax.jit(of)(agent), jax.jit(of)(plain)
    kernel, bias = (agent.improvement.params[name].get_value() for name in ("kernel", "bias"))
    np.testing.assert_allclose(edited, own + 0.3 * np.tanh(own @ kernel + bias), rtol=1e-5, atol=1e-6)
    assert float(loss) != float(own_loss)


def test_micro_batches_change_nothing(config, updated):
    whole, info = updated[1], updated[2]
    training = dataclasses.replace(config.training, gradient_accumulation_steps=4)
    split = jax.jit(create_agent, static_argnums=0)(dataclasses.replace(config, training=training), KEY)
    after, split_info = quick_call(train_step, split, updated[3], KEY)
    assert_trees_close(split_info, info, rtol=2e-4, atol=2e-6)
    assert_trees_close(after.improvement.opt_state[1][0].mu, whole.improvement.opt_state[1][0].mu, rtol=1e-3, atol=1e-6)


def test_a_config_names_it(config):
    named = apply_config_overrides(get_config("debug"), {"improvement": kind_name(EditActions())})
    assert named.improvement == EditActions()
    assert parse_config(config_to_yaml(named)) == named
