"""What critics read of the policy's tokens: where things are, and nothing of the padding."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from agent_helpers import assert_trees_close, make_batch, make_config, quick_jit
from flax import nnx

from acrlpd.agents.networks import create_critic_networks
from acrlpd.config import MLPCritics
from acrlpd.config.create_agent import create_agent
from acrlpd.config.plan.flops import count_flops
from acrlpd.models.families.state_flow import StateFlowPolicy, StateFlowPolicyConfig
from acrlpd.models.observation import Observation
from acrlpd.models.policy import Context, Features

DIM, PLACES = 16, 5
KEY = jax.random.key(1)


def scenes() -> tuple[Features, np.ndarray]:
    """Two things at two of five places, in all 20 ways. The value says which of the two things stands further left.

    Each token is the sum of what is at a place and of the place, so swapping the things does not change the mean.
    """
    rng = np.random.default_rng(0)
    places, things = rng.normal(size=(PLACES, DIM)), rng.normal(size=(2, DIM))
    pairs = list(itertools.permutations(range(PLACES), 2))
    tokens = np.tile(places, (len(pairs), 1, 1))
    for scene, pair in zip(tokens, pairs, strict=True):
        scene[list(pair)] += things
    length = np.full(len(pairs), PLACES, np.int32)
    values = np.array([1.0 if first < second else -1.0 for first, second in pairs], np.float32)
    return Features(jnp.asarray(tokens, jnp.float32), jnp.asarray(length)), values


def learn(pooling: str) -> np.ndarray:
    """The values of all scenes after 300 updates, [scenes]."""
    features, values = scenes()
    config = MLPCritics(num_critics=2, hidden_dims=(64, 64), pooling=pooling)
    critics = create_critic_networks(config, jax.random.key(0), feature_dim=DIM, state_dim=1, chunk_dim=1)
    empty = jnp.zeros((len(values), 1))
    optimizer = optax.adam(1e-3)

    def judge(params: nnx.State) -> jax.Array:
        return nnx.merge(critics.network, params)(features, Observation({}, {}, empty), empty[:, None])[:, 0]

    def update(carry, _):
        params, state = carry
        grads = jax.grad(lambda params: jnp.mean(jnp.square(judge(params) - values[:, None])))(params)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    def run(params: nnx.State) -> jax.Array:
        return judge(jax.lax.scan(update, (params, optimizer.init(params)), length=300)[0][0])

    return np.asarray(jnp.mean(quick_jit(run)(critics.online), axis=-1))


def test_attention_learns_where_things_are_and_the_mean_cannot():
    _, values = scenes()
    assert np.abs(learn("attention") - values).max() < 0.2
    # The values of a scene and of its twin are 1 and -1, so the best guess is 0.
    assert np.abs(learn("mean")).max() < 0.2


def read(features: Features) -> jax.Array:
    config = MLPCritics(num_critics=2, hidden_dims=(8,), pooling="attention")
    sizes = {"feature_dim": features.tokens.shape[-1], "state_dim": 1, "chunk_dim": 1}
    critics = create_critic_networks(config, jax.random.key(0), **sizes)
    observation = Observation({}, {}, jnp.zeros((len(features.length), 1)))
    return critics.online_ensemble.reader(features, observation)


def test_padding_is_not_read():
    """Tokens behind the end change nothing, whatever they are; neither does the number of them."""
    rng = np.random.default_rng(0)
    tokens = rng.normal(size=(3, 6, DIM)).astype(np.float32)
    length = np.array([2, 4, 3], np.int32)
    seen = read(Features(jnp.asarray(tokens), jnp.asarray(length)))
    is_padding = np.arange(6) >= length[:, None]
    other = np.where(is_padding[..., None], 100 * rng.normal(size=tokens.shape), tokens).astype(np.float32)
    longer = np.concatenate([other, other], axis=1)
    np.testing.assert_allclose(read(Features(jnp.asarray(longer), jnp.asarray(length))), seen, rtol=1e-5, atol=1e-5)
    for sample, end in enumerate(length):
        alone = Features(jnp.asarray(tokens[sample : sample + 1, :end]), jnp.asarray([end]))
        np.testing.assert_allclose(read(alone)[0], seen[sample], rtol=1e-5, atol=1e-5)
    assert np.isfinite(read(Features(jnp.asarray(tokens), jnp.zeros(3, jnp.int32)))).all()


def test_an_observation_is_read_once_for_all_of_its_candidates():
    features = Features(jnp.zeros((2, 800, 256), jnp.bfloat16), jnp.full(2, 800))
    config = MLPCritics(num_critics=2, hidden_dims=(8,), pooling="attention")
    critics = create_critic_networks(config, jax.random.key(0), feature_dim=256, state_dim=1, chunk_dim=4)

    def count(n: int) -> int:
        observation, chunks = Observation({}, {}, jnp.zeros((2, 1))), jnp.zeros((2, n, 4))
        return count_flops(critics.online_ensemble, features, observation, chunks).total()

    assert count(1) > 2 * 2 * 800 * 256 * 8  # the weights of the tokens alone
    assert count(64) < 1.1 * count(1)


@dataclasses.dataclass(frozen=True)
class TokenPolicyConfig(StateFlowPolicyConfig):
    """The smallest policy with tokens: one for each dim of the state, of which the last is padding."""

    feature_dim = DIM

    def create(self, rng: jax.Array) -> "TokenPolicy":
        return TokenPolicy(self, nnx.Rngs(rng))


class TokenPolicy(StateFlowPolicy):
    def __init__(self, config: TokenPolicyConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.embed = nnx.Linear(1, DIM, rngs=rngs)

    def encode(self, observation: Observation, *, features: bool = True) -> Context:
        b, num_tokens = observation.state.shape
        tokens = self.embed(observation.state[..., None])
        return super().encode(observation).replace(features=Features(tokens, jnp.full(b, num_tokens - 1)))


def test_micro_batches_train_the_pool_as_whole_batches_do():
    """The critics' gradient goes through the pool into the policy here, which micro-batches must not change either."""

    def updated(accumulation: int):
        model = TokenPolicyConfig(state_dim=4, action_dim=3, action_horizon=4, hidden_dims=(8,))
        critic = {"pooling": "attention"}
        config = make_config(model=model, critic=critic, accumulation=accumulation, critic_gradient_to_policy=True)
        old = quick_jit(lambda key: create_agent(config, key))(KEY)
        new, info = quick_jit(lambda agent, batch: agent.train_step(batch, KEY))(old, make_batch(config, 4))
        return old, new, info

    old, whole, info = updated(1)
    _, parts, info_of_parts = updated(2)
    for name in ("policy_grad_norm", "critic_grad_norm"):
        np.testing.assert_allclose(info_of_parts[name], info[name], rtol=1e-4)
    assert_trees_close(parts.critics, whole.critics, rtol=1e-4, atol=1e-6)
    assert_trees_close(parts.policy_params, whole.policy_params, rtol=1e-4, atol=1e-6)
    # Nothing but the critics reads the embedding of tokens.
    before, after = ((a.policy_params["embed"], a.critics.online["reader"]["pool"]) for a in (old, whole))
    for (path, new), leaf in zip(jax.tree_util.tree_leaves_with_path(after), jax.tree.leaves(before), strict=True):
        assert np.mean(np.asarray(new) != np.asarray(leaf)) > 0.9, path
