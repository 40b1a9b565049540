import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest

sys.path.append(str(pathlib.Path(__file__).parents[1] / "training"))  # tiny configs

from training_helpers import state_config

from acrlpd import seeds
from acrlpd.config import RLTrainConfig


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> RLTrainConfig:
    """Few updates of the state-space policy, with a policy improvement, so that there are all losses."""
    changes = {"acrlpd__loss_weights__actor_weight": 1.0, "offline_steps": 4, "log_frequency": 2, "save_frequency": 4}
    return state_config(tmp_path_factory.mktemp("seeds"), **changes)


@pytest.fixture(scope="session")
def loader(config: RLTrainConfig):
    with seeds.create_acrlpd_data_loader(rl_config=config, batch_size=config.batch_size) as loader:
        yield loader


@pytest.fixture(scope="session")
def made(config: RLTrainConfig) -> seeds.ACRLPDPi0Agent:
    return seeds.create_acrlpd_pi0_agent_from_rl_config(rl_config=config, rng=jax.random.key(0))


@pytest.fixture
def agent(made: seeds.ACRLPDPi0Agent) -> seeds.ACRLPDPi0Agent:
    """A copy, because training uses the arrays of an agent up."""
    return jax.tree.map(jnp.copy, made)
