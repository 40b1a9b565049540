"""Which critics an export keeps when it does not keep all: those whose choices the whole ensemble values most."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from acrlpd.config import RLTrainConfig
from acrlpd.data.pipeline.loader import create_data_loader
from acrlpd.models.observation import Observation
from acrlpd.policies.acting_model import ActingModel, candidate_noise, candidates_and_values

_NUM_CANDIDATES = 16
_NUM_OBSERVATIONS = 32


def rank_critics(model: ActingModel, observation: Observation, *, num_steps: int, seed: int = 0) -> np.ndarray:
    """Members of the ensemble, best first.

    A member's score is the value, by the whole ensemble, of the candidates that it alone would choose.
    """
    policy = model.policy()
    chunk_shape = (policy.action_horizon, policy.action_dim)
    seeds = range(seed, seed + observation.state.shape[0])
    noise = np.stack([candidate_noise(each, _NUM_CANDIDATES, *chunk_shape) for each in seeds])
    scores = _scores(model, observation, noise, num_steps=num_steps)
    return np.argsort(-np.asarray(scores), kind="stable")


@partial(jax.jit, static_argnames="num_steps")
def _scores(model: ActingModel, observation: Observation, noise: jax.Array, *, num_steps: int) -> jax.Array:
    _, values = candidates_and_values(model, observation, noise, num_steps=num_steps)
    by_all = model.networks().critics.online_ensemble.aggregate(values)  # [b, n]
    chosen = jnp.argmax(values, axis=1)  # [b, E]
    return jnp.mean(jnp.take_along_axis(by_all, chosen, axis=1), axis=0)


def training_observations(rl_config: RLTrainConfig) -> Observation:
    """Some observations of a run's data; where the data is not here, the error says what to do."""
    try:
        with create_data_loader(rl_config, _NUM_OBSERVATIONS) as loader:
            return jax.device_get(loader.sample_batch().observations)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"critics are ranked on the run's data, which cannot be read: {error}\n"
            "Export where the data is, or keep every critic with --critics all"
        ) from error
