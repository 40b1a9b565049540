"""A policy family is what its config says about itself: a family of a user's own, and what pi0 tells openpi's users."""

import ast
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from acrlpd.agents import train_step
from acrlpd.config import apply_config_overrides, get_config
from acrlpd.config.create_agent import create_agent
from acrlpd.config.plan.flops import batch_spec
from acrlpd.config.plan.plan import make_plan
from acrlpd.models.families.base import PolicyConfig
from acrlpd.models.families.pi0 import Pi0Config
from acrlpd.models.policy import Context, FlowPolicy
from acrlpd.policies.acting_model import acting_model, choose_actions


@dataclasses.dataclass(frozen=True)
class OwnPolicyConfig(PolicyConfig):
    """One hidden layer over state, noisy chunk and flow time."""

    dtype: str = "float32"
    state_dim: int = 6
    action_dim: int = 3
    action_horizon: int = 4
    width: int = 32

    def create(self, rng):
        return OwnPolicy(self, nnx.Rngs(rng))


class OwnPolicy(FlowPolicy):
    def __init__(self, config, rngs):
        super().__init__(config)
        chunk = config.action_horizon * config.action_dim
        self.hidden = nnx.Linear(config.state_dim + chunk + 1, config.width, rngs=rngs)
        self.out = nnx.Linear(config.width, chunk, rngs=rngs)

    def encode(self, observation, *, features=True):
        state = jnp.asarray(observation.state)
        return Context(features=jnp.zeros((len(state), 0)) if features else None, memory=state)

    def velocity(self, context, x_t, time):
        b, n = x_t.shape[:2]
        state = jnp.broadcast_to(context.memory[:, None], (b, n, context.memory.shape[-1]))
        inputs = jnp.concatenate([state, x_t.reshape(b, n, -1), time[..., None]], axis=-1)
        return self.out(jnp.tanh(self.hidden(inputs))).reshape(x_t.shape)


@pytest.fixture(scope="module")
def config():
    """The family is named as in a YAML file or on the command line."""
    changes = {
        "model": f"{__name__}:OwnPolicyConfig",
        "model.width": 16,
        "qchunking.action_dim": 3,
        "qchunking.horizon_length": 4,
        "acrlpd.sampling_steps": 2,
    }
    return apply_config_overrides(get_config("debug"), changes)


def test_an_own_family_trains_and_acts(config):
    assert type(config.model) is OwnPolicyConfig
    assert config.model.width == 16
    agent = jax.jit(lambda key: create_agent(config, key))(jax.random.key(0))
    before = jax.tree.map(np.asarray, agent.policy_params)
    rng = np.random.default_rng(0)
    batch = jax.tree.map(lambda x: jnp.asarray(rng.uniform(size=x.shape).astype(x.dtype)), batch_spec(config))
    for _ in range(2):
        agent, info = train_step(agent, batch, jax.random.key(1))
    assert int(agent.step) == 2
    assert np.isfinite(float(info["total_loss"]))
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(agent.policy_params), strict=True):
        assert np.abs(old - new).max() > 0
    noise = rng.standard_normal((5, 2, 4, 3), np.float32)
    model = acting_model(agent, average=True)
    actions = choose_actions(model, config.model.fake_obs(5), noise, np.full(5, 2), num_steps=2).actions
    assert actions.shape == (5, 4, 3)
    assert np.isfinite(actions).all()


def test_an_own_family_is_planned_from_its_network(config):
    plan = make_plan(config, accelerator="H200")
    assert plan.fits
    assert plan.step_seconds > 0
    products = 2 * ((6 + 12 + 1) * 16 + 16 * 12)
    assert plan.flops.forward == products
    assert plan.flops.candidate == 2 * products
    working = config.model.working_memory(freeze_pi0_backbone=False)
    assert working.context == 6 * 4
    inputs, hidden = (6 + 12 + 1) * 4, 16 * 4
    assert inputs + hidden <= working.kept <= 4 * (inputs + hidden)


def test_a_family_without_backbone_and_weights_says_so(config):
    messages = [
        message
        for _, message in config.model.check(
            freeze_pi0_backbone=True, weights="gs://openpi-assets/checkpoints/pi0_base"
        )
    ]
    assert len(messages) == 2
    assert f"{__name__}:OwnPolicyConfig policy has no backbone" in messages[0]
    assert "do not fit" in messages[1] and "a checkpoint of a run" in messages[1]
    assert not list(config.model.check(freeze_pi0_backbone=False, weights=None))
    with pytest.raises(ValueError, match="no adapters to merge"):
        config.model.merge_adapters(nnx.State({}))
    with pytest.raises(ValueError, match="openpi has no"):
        config.model.openpi_call()


@pytest.mark.parametrize(
    "model",
    [Pi0Config(), Pi0Config(pi05=True, action_horizon=10, action_expert_variant="dummy", paligemma_variant="dummy")],
)
def test_pi0_in_openpis_words(model):
    call = ast.parse(model.openpi_call(), mode="eval").body
    assert isinstance(call, ast.Call)
    assert ast.unparse(call.func) == "pi0_config.Pi0Config"
    settings = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    assert settings == {
        "pi05": model.pi05,
        "action_dim": 32,
        "action_horizon": model.action_horizon,
        "max_token_len": 200 if model.pi05 else 48,
        "discrete_state_input": model.pi05,
        "dtype": "bfloat16",
        "paligemma_variant": model.paligemma_variant,
        "action_expert_variant": model.action_expert_variant,
    }
    assert not list(model.openpi_differences())


def test_what_openpi_cannot_build():
    model = Pi0Config(
        paligemma_variant="tiny", action_expert_variant="tiny", siglip_variant="mu/14", discrete_state_input=True
    )
    sizes, state = model.openpi_differences()
    assert all(word in sizes for word in ("`siglip_variant='mu/14'`", "`paligemma_variant='tiny'`", "cannot build"))
    assert "vocab_size" not in sizes
    assert "for pi0.5 only" in state
