"""Critics that read the cameras with a network of their own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from agent_helpers import compute_part, make_batch, make_config, quick_jit, random_agent, tiny_pi0
from flax import nnx

from acrlpd.agents.networks import create_critic_networks
from acrlpd.config import MLPCritics
from acrlpd.config.create_agent import create_agent
from acrlpd.config.plan.flops import step_flops
from acrlpd.config.plan.memory import estimate_memory
from acrlpd.models.families.state_flow import StateFlowPolicyConfig
from acrlpd.models.image_encoder import ImageEncoder
from acrlpd.models.observation import Observation

CAMERAS = ("base_0_rgb", "left_wrist_0_rgb")
KEY = jax.random.key(1)
OWN_EYES = {"use_pi0_features": False, "image_encoder": "small"}


def observe(images: np.ndarray, masks: np.ndarray | None = None) -> Observation:
    """Images [cameras, b, h, w, 3]."""
    masks = np.ones(images.shape[:2], bool) if masks is None else masks
    return Observation(
        dict(zip(CAMERAS, map(jnp.asarray, images), strict=False)),
        dict(zip(CAMERAS, map(jnp.asarray, masks), strict=False)),
        jnp.zeros((images.shape[1], 1)),
    )


def test_they_learn_where_a_thing_is():
    """A bright square in one of 16 places of a dark image: the value is the row of the place."""
    images, values = np.full((1, 16, 42, 42, 3), -1.0, np.float32), np.repeat([-1.0, -0.3, 0.3, 1.0], 4)
    for i, image in enumerate(images[0]):
        y, x = 10 * (i // 4), 10 * (i % 4)
        image[y : y + 10, x : x + 10] = 1.0
    config = MLPCritics(num_critics=1, hidden_dims=(32,), **OWN_EYES)
    sizes = {"feature_dim": 0, "state_dim": 1, "chunk_dim": 1, "image_keys": CAMERAS[:1]}
    critics = create_critic_networks(config, jax.random.key(0), **sizes)
    optimizer = optax.adam(1e-3)

    @jax.jit  # with good machine code: convolutions are slow without
    def update(params, state):
        def loss(params):
            q = nnx.merge(critics.network, params)(None, observe(images), jnp.zeros((16, 1, 1)))[:, 0, 0]
            return jnp.mean(jnp.square(q - values)), q

        grads, q = jax.grad(loss, has_aux=True)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, q

    params, state = critics.online, optimizer.init(critics.online)
    for _ in range(40):
        params, state, q = update(params, state)
    assert np.abs(q - values).max() < 0.3


def test_a_camera_that_gave_nothing_is_not_read():
    encoder = ImageEncoder(CAMERAS, nnx.Rngs(0))
    rng = np.random.default_rng(0)
    images, masks = rng.uniform(-1, 1, (2, 3, 28, 28, 3)).astype(np.float32), np.ones((2, 3), bool)
    masks[1, 0] = False
    other = images.copy()
    other[1] = rng.uniform(-1, 1, images[1].shape)
    read = quick_jit(lambda observation: encoder(observation))
    before, after = read(observe(images, masks)), read(observe(other, masks))
    assert before.shape == (3, encoder.width)
    np.testing.assert_array_equal(before[0], after[0])
    assert not np.allclose(before[1:], after[1:])


def test_images_of_any_size_are_read_as_bytes_and_as_floats():
    encoder = ImageEncoder(CAMERAS[:1], nnx.Rngs(0))
    images = np.random.default_rng(0).integers(0, 256, (1, 2, 28, 40, 3))
    seen = encoder(observe(images.astype(np.uint8)))
    assert seen.shape == (2, encoder.width)
    np.testing.assert_allclose(encoder(observe((images / 127.5 - 1).astype(np.float32))), seen, atol=1e-4)


@dataclasses.dataclass(frozen=True)
class CameraPolicyConfig(StateFlowPolicyConfig):
    """A policy that is given images and looks at its state alone, so that it compiles fast."""

    image_keys = CAMERAS[:1]
    image_resolution = (28, 28)


def test_the_critic_loss_alone_trains_them():
    model = CameraPolicyConfig(state_dim=4, action_dim=3, action_horizon=4, hidden_dims=(8,))
    config = make_config(model=model, critic=OWN_EYES)
    agent = random_agent(config)
    batch = make_batch(config, 2, all_valid=True)

    @jax.jit
    def gradients(agent):
        def loss(online, part):
            return compute_part(agent.replace(critics=agent.critics.replace(online=online)), part, batch, KEY)[0]

        return {part: jax.grad(loss)(agent.critics.online, part)["reader"] for part in ("critic", "actor", "bc")}

    largest = {name: jax.tree.map(lambda x: float(jnp.abs(x).max()), part) for name, part in gradients(agent).items()}
    assert min(jax.tree.leaves(largest["critic"])) > 0
    assert max(jax.tree.leaves((largest["actor"], largest["bc"]))) == 0


def test_the_plan_counts_them():
    model = tiny_pi0(image_keys=CAMERAS)
    with_eyes, without = (make_config(model=model, critic={"image_encoder": kind}) for kind in ("small", "none"))
    assert step_flops(with_eyes).critics > 2 * step_flops(without).critics
    assert step_flops(with_eyes).backward == step_flops(without).backward
    batches = [dataclasses.replace(config, batch_size=256) for config in (with_eyes, without)]
    more, less = (estimate_memory(config) for config in batches)
    assert more.activations - less.activations > 256 * 2 * 14 * 14 * 32 * 4


def test_critics_cannot_read_the_cameras_of_a_policy_without_cameras():
    with pytest.raises(ValueError, match=r"critic.image_encoder small reads the cameras .* give the policy cameras"):
        create_agent(make_config(critic={"image_encoder": "small"}), jax.random.key(0))
