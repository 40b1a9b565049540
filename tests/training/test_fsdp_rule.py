"""Arrays are split by openpi's rule, those of openpi and those of the critics alike."""

import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from training_helpers import state_config

from acrlpd.agents import Call
from acrlpd.config import apply_config_overrides, get_config
from acrlpd.config.create_agent import create_agent
from acrlpd.data.pipeline.loader import create_data_loader
from acrlpd.models.families.pi0 import Pi0Config
from acrlpd.training.sharding import (
    FSDPSharding,
    compile_train_steps,
    create_fsdp_mesh,
    create_sharding,
    init_fsdp_train_state,
    validate_fsdp_sharding,
)

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"
LORA = Pi0Config(paligemma_variant="gemma_2b_lora", action_expert_variant="gemma_300m_lora")


def abstract_sharding(batch: int, fsdp: int) -> FSDPSharding:
    return FSDPSharding(AbstractMesh((batch, fsdp), ("batch", "fsdp")))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("golden", "config", "frozen_dtype"),
    [
        ("pi0_fsdp8", Pi0Config(), jnp.float32),
        ("pi05_fsdp4", Pi0Config(pi05=True), jnp.float32),
        ("pi0_lora_fsdp2", LORA, jnp.float32),
        ("pi0_lora_frozenbf16_fsdp8", LORA, jnp.bfloat16),
    ],
)
def test_openpi_puts_the_policy_there_too(golden: str, config: Pi0Config, frozen_dtype: jnp.dtype) -> None:
    expected = json.loads((GOLDENS / f"fsdp_specs_{golden}.json").read_text())
    shape = expected["mesh_shape"]
    sharding = abstract_sharding(shape["batch"], shape["fsdp"])
    model = nnx.eval_shape(lambda: config.create(jax.random.key(0)))
    _, frozen, trainable = nnx.split(model, config.get_freeze_filter(), ...)
    found = {}
    for state, dtype in ((frozen, frozen_dtype), (trainable, jnp.float32)):
        for path, leaf in nnx.to_flat_state(state):
            place = sharding.of_array(jax.ShapeDtypeStruct(leaf.get_value().shape, dtype))
            found["/".join(path)] = list(place.spec) if place.spec else None
    assert found == expected["specs"]


@given(
    st.lists(st.integers(1, 64).map(lambda n: n * 7), min_size=0, max_size=4),
    st.sampled_from([1, 2, 4, 7, 8]),
    st.sampled_from([jnp.bfloat16, jnp.float32]),
)
def test_the_rule_in_openpis_own_words(shape: list[int], fsdp: int, dtype: jnp.dtype) -> None:
    """Go through the axes from the largest, of equal axes the last first; split the first that the devices divide."""
    array = jax.ShapeDtypeStruct(tuple(shape), dtype)
    expected: list[str | None] = []
    if fsdp > 1 and len(shape) >= 2 and math.prod(shape) * array.dtype.itemsize >= 4 * 2**20:
        for axis in np.argsort(shape, kind="stable")[::-1]:
            if shape[axis] % fsdp == 0:
                expected = [None] * len(shape)
                expected[axis] = "fsdp"
                break
    assert list(abstract_sharding(1, fsdp).of_array(array).spec) == expected


@pytest.mark.parametrize("preset", ["libero", "droid_pi05"])
def test_a_full_size_state_is_an_eighth_on_each_of_eight_devices(preset: str) -> None:
    """Only small arrays and scalars are on every device; all other arrays of the agent are split."""
    config = apply_config_overrides(get_config(preset), {"freeze_pi0_backbone": False})
    sharding = abstract_sharding(1, 8)
    agent = jax.eval_shape(lambda rng: create_agent(config, rng), jax.random.key(0))
    report = validate_fsdp_sharding(sharding.abstract(agent), sharding)
    assert report
    assert report.total_bytes > 40e9
    assert report.device_bytes <= (1 / 8 + 0.05) * report.total_bytes
    critic = sharding.of_array(agent.critics.online["observation_kernel"].get_value())
    assert critic.spec  # large critics are split as well


def test_misplaced_arrays_are_named() -> None:
    sharding = abstract_sharding(1, 8)
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    state = {
        "small": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=whole),
        "large": jax.ShapeDtypeStruct((2**20, 8), jnp.float32, sharding=whole),
    }
    report = validate_fsdp_sharding(state, sharding)
    assert not report
    assert report.misplaced == ("['large']: expected P('fsdp', None), found P()",)
    assert report.device_bytes == report.total_bytes


def test_a_mesh_that_does_not_come_out_even_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must divide the number of devices, 1: choose one of \[1\]; found 3"):
        create_fsdp_mesh(3, jax.devices()[:1])


def test_every_update_has_its_own_noise(tmp_path: pathlib.Path) -> None:
    """One key serves a whole run: the same agent and batch at another step are another update."""
    config = state_config(tmp_path, batch_size=4)
    sharding = create_sharding(config)
    agent = init_fsdp_train_state(config, sharding, jax.random.key(0))
    with create_data_loader(config, device_sharding=sharding.data) as loader:
        feed = loader.sample_feed(1)
    call = Call(feed, np.ones(feed.capacity, np.float32), jax.random.key(1))
    train_steps = compile_train_steps([agent], [call], sharding)

    def loss(step: int) -> float:
        at_step = jax.tree.map(jnp.copy, agent).replace(step=jax.device_put(jnp.int32(step), sharding.replicated))
        return train_steps([at_step], [call], np.int32(1))[1].rows(1)[0]["bc_loss"]

    assert loss(0) == loss(0) != loss(1)
