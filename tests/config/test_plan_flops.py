"""The plan's arithmetic against hand counts, published counts, and what an update is known to consist of."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from acrlpd.config import apply_config_overrides, get_config
from acrlpd.config.create_agent import create_agent
from acrlpd.config.plan.flops import count_flops, step_flops
from acrlpd.models.families.pi0 import Pi0Config

# Sizes at which neither the context nor a chunk needs padding.
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
PI05 = {"model.pi05": True, "model.max_token_len": 64}
LORA = {"model.paligemma_variant": "dummy_lora", "model.action_expert_variant": "dummy_lora"}
STATE = {"model.type": "state_flow", "model.action_dim": 7}

A, B = jnp.ones((2, 3, 4)), jnp.ones((2, 4, 5))
PRODUCT = 2 * 2 * 3 * 4 * 5


def total(function, *args) -> int:
    return count_flops(function, *args).total()


def test_products_are_counted_inside_loops_and_branches_but_not_if_unused():
    assert total(jnp.matmul, A, B) == PRODUCT
    assert total(lambda a, b: jax.lax.map(lambda _: a @ b, jnp.arange(7)), A, B) == 7 * PRODUCT
    assert total(lambda a, b: jax.lax.cond(a.sum() > 0, lambda: a @ b, lambda: (a @ b @ b.mT) @ b), A, B) == 3 * PRODUCT
    assert total(jax.jit(lambda a, b: (a @ b, a + 1)[1]), A, B) == 0
    assert total(lambda a, b: jax.lax.scan(lambda c, _: (c, a @ b), 0, length=7)[0], A, B) == 0
    assert total(jax.grad(lambda a, b: (a @ b).sum(), argnums=(0, 1)), A, B) == 2 * PRODUCT  # the value is not used


def test_convolutions_are_counted_with_their_gradients():
    """5 x 7 images, so that a stride of 2 gives 3 x 4 outputs."""
    image, kernel = jnp.ones((2, 5, 7, 3)), jnp.ones((3, 3, 3, 8))

    def convolve(image, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(image, kernel, (2, 2), "SAME", dimension_numbers=numbers)

    forward = 2 * (2 * 3 * 4 * 8) * (3 * 3 * 3)
    assert total(convolve, image, kernel) == forward
    grad = jax.grad(lambda *args: convolve(*args).sum(), argnums=1)
    assert total(grad, image, kernel) == forward
    both = jax.grad(lambda *args: convolve(*args).sum(), argnums=(0, 1))
    assert total(both, image, kernel) == pytest.approx(2 * forward, rel=0.2)  # odd sizes: the stride does not divide


def test_products_are_counted_by_scope():
    @jax.named_scope("outer")
    def function(a, b):
        with jax.named_scope("inner"):
            loop = jax.lax.map(lambda _: a @ b, jnp.arange(7))
        return loop, a @ b

    counts = count_flops(function, A, B)
    assert sum(flops for scopes, flops in counts.items() if "inner" in scopes) == 7 * PRODUCT
    assert sum(flops for scopes, flops in counts.items() if "outer" in scopes) == 8 * PRODUCT


def test_what_is_computed_again_is_marked():
    layer = jax.checkpoint(lambda a, b: jnp.sin(jnp.sin(a @ b) @ b.mT))
    counts = count_flops(jax.value_and_grad(lambda a, b: layer(a, b).sum(), argnums=(0, 1)), A, B)
    assert sum(flops for scopes, flops in counts.items() if "rematted_computation" in scopes) == 2 * PRODUCT
    assert counts.total() == (2 + 2 + 4) * PRODUCT


def test_full_size_pi0_matches_the_published_counts():
    changes = {"freeze_pi0_backbone": False, "model.action_horizon": 50, "acrlpd.sampling_steps": 10}
    flops = step_flops(apply_config_overrides(get_config("aloha"), changes))
    assert flops.forward == pytest.approx(4.04e12, rel=0.01)
    assert flops.train == pytest.approx(12.11e12, rel=0.01)
    # Published with the state token in every denoising step; here the state token belongs to the context.
    assert flops.candidate == pytest.approx(0.386e12, rel=0.02)
    two = step_flops(
        apply_config_overrides(get_config("aloha"), {**changes, "model.image_keys": ["base_0_rgb", "left_wrist_0_rgb"]})
    )
    assert 1 - two.forward / flops.forward == pytest.approx(0.32, abs=0.01)


@functools.cache
def pieces(**changes) -> tuple[float, float]:
    """Operations of the policy's prefix and of one velocity, for one sample."""
    config = apply_config_overrides(TINY, changes)
    agent = jax.eval_shape(lambda key: create_agent(config, key), jax.random.key(0))
    observation, actions = config.model.inputs_spec(1)
    prefix = total(lambda agent, observation: agent.policy().encode(observation), agent, observation)

    def forward(agent, observation, actions):
        policy = agent.policy()
        return policy.velocity(policy.encode(observation), actions[:, None], jnp.ones((1, 1)))

    return prefix, total(forward, agent, observation, actions) - prefix


def reference(model: Pi0Config) -> float:
    """Every weight multiplies every token that it sees once, and every query meets every key twice."""
    images = len(model.image_keys) * model.tokens_per_image
    prefix, state, horizon = images + model.prompt_len, int(not model.pi05), model.action_horizon
    weights = 0.0
    params = nnx.state(nnx.eval_shape(lambda: model.create(jax.random.key(0))), nnx.Param)
    for path, leaf in nnx.to_flat_state(params):
        name, size = "/".join(path), math.prod(leaf.shape)
        if name.endswith(("bias", "scale", "embedding")):
            tokens = 0
        elif "attn_vec" in name and name.endswith("lora_b"):  # summed over heads before the product
            tokens = (prefix if "_1/" not in name else horizon + state) / leaf.shape[1]
        elif "/img/" in name:
            tokens = images
        elif "Dense_0" in name or name.startswith(("state_proj", "time_mlp")):
            tokens = 1
        elif "/llm/" in name:
            tokens = horizon + state if "_1/" in name else prefix
        else:
            tokens = horizon
        weights += 2.0 * tokens * size
    gemma, siglip = model.paligemma, model.siglip
    queries = prefix**2 + state * (prefix + state) + horizon * (prefix + state + horizon)
    attention = 4.0 * gemma.depth * gemma.num_heads * gemma.head_dim * queries
    return weights + attention + 4.0 * siglip.depth * siglip.width * images * model.tokens_per_image


@pytest.mark.parametrize("changes", [{}, PI05, LORA])
def test_policy_forward(changes):
    model = apply_config_overrides(TINY, changes).model
    assert sum(pieces(**changes)) == pytest.approx(reference(model), rel=0.005)


@pytest.mark.parametrize(
    ("changes", "prefixes", "velocities", "sampled"),
    [
        ({}, 3, 3, 2),
        (PI05, 3, 3, 2),
        ({"freeze_pi0_backbone": True}, 1, 3, 2),
        ({"gradient_accumulation_steps": 2}, 3, 3, 2),
        ({"improvement": "best_of_n"}, 3, 6, 2),
        ({"improvement": "policy_gradient"}, 3, 3 + 3 * 3, 1),
        ({"loss_weights.actor_weight": 0.0}, 3, 3, 1),
        ({"model.remat_policy": "none"}, 3, 3, 2),
        ({"model.remat_policy": "dots"}, 3, 3, 2),
        ({"acrlpd.num_action_samples": 8, "critic.feature_fusion_method": "mlp"}, 3, 3, 2),
        ({**STATE, "acrlpd.num_action_samples": 16}, 3, 3, 2),
    ],
)
def test_parts_of_an_update(changes, prefixes, velocities, sampled):
    """Trained networks cost three forward passes; candidates are sampled at one observation or at both."""
    config = apply_config_overrides(TINY, changes)
    flops = step_flops(config)
    prefix, velocity = pieces(**{name: value for name, value in changes.items() if name.startswith("model")})
    # The first layers have no inputs that need a gradient.
    assert flops.backward == pytest.approx(prefixes * prefix + velocities * velocity, rel=0.03)
    assert flops.candidate == pytest.approx(3 * velocity, rel=0.01)
    assert flops.candidates == pytest.approx(sampled * config.acrlpd.num_action_samples * flops.candidate, rel=1e-6)
    accumulates = config.training.gradient_accumulation_steps > 1
    assert flops.no_gradient == pytest.approx((2 if accumulates else 1) * prefix, rel=0.01)
    assert flops.critics > 0
    remat = getattr(config.model, "remat_policy", "none")
    trained = (prefixes - 1) / 2 * prefix + (velocities - 1) / 2 * velocity
    low, high = {"none": (0, 0), "dots": (0.05, 0.6), "full": (0.6, 1.0)}[remat]
    assert low * trained <= flops.recompute <= high * trained


def test_recomputing_changes_nothing_else():
    kept = step_flops(apply_config_overrides(TINY, {"model.remat_policy": "none"}))
    recomputed = step_flops(TINY)
    assert recomputed.total - recomputed.recompute == pytest.approx(kept.total)
    adapters = step_flops(apply_config_overrides(TINY, LORA))
    assert adapters.backward < recomputed.backward  # weights without gradient
    assert adapters.forward > recomputed.forward


def test_updates_of_the_critics_alone_cost_less():
    """With k critic updates per policy update, k - 1 of k updates leave the policy's backward pass out."""
    config = apply_config_overrides(get_config("debug"), STATE)
    both, every_second, every_fourth = (
        step_flops(apply_config_overrides(config, {"acrlpd.critic_updates_per_policy_update": k})) for k in (1, 2, 4)
    )
    of_critics = 2 * every_second.total - both.total
    assert 0 < of_critics < both.total
    assert every_fourth.total == pytest.approx((both.total + 3 * of_critics) / 4)
