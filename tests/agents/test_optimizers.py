"""Schedules, AdamW and the moving average against numbers that openpi itself produced."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from agent_helpers import assert_trees_identical, make_config, random_agent

from acrlpd.agents.metrics import global_norm
from acrlpd.agents.optimizers.adamw import AdamW
from acrlpd.agents.optimizers.base import OptimizerConfig, create_optimizer
from acrlpd.agents.schedules.constant import ConstantSchedule
from acrlpd.agents.schedules.cosine import CosineDecaySchedule
from acrlpd.agents.schedules.rsqrt import RsqrtDecaySchedule

GOLDEN = Path(__file__).parents[1] / "goldens" / "optimizer.npz"


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN) as data:
        return dict(data)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("cosine_default", CosineDecaySchedule()),
        ("rsqrt_default", RsqrtDecaySchedule()),
        ("cosine_pi05_libero", CosineDecaySchedule(10_000, 5e-5, 1_000_000, 5e-5)),
    ],
)
def test_schedules_are_openpis(golden, name, config):
    schedule = config.create()
    rates = [float(schedule(jnp.asarray(step))) for step in golden["steps"]]
    np.testing.assert_allclose(rates, golden[name], rtol=2e-6)


@pytest.mark.parametrize(
    ("name", "config", "schedule"),
    [
        ("adamw_default_sched", AdamW(), CosineDecaySchedule()),
        ("adamw_lr1e-2_wd0.1", AdamW(weight_decay=0.1), ConstantSchedule(1e-2)),
    ],
)
def test_adamw_is_openpis(golden, name, config, schedule):
    def tree(kind: str, i: int) -> dict:
        return {"a": golden[f"{name}/{kind}{i}/a"], "b": {"c": golden[f"{name}/{kind}{i}/b/c"]}}

    optimizer = create_optimizer(config, schedule)
    params = jax.tree.map(jnp.asarray, tree("params", 0))
    opt_state = optimizer.tx.init(params)
    for i in range(5):
        assert float(optimizer.learning_rate(opt_state)) == pytest.approx(
            float(schedule.create()(jnp.asarray(i))), rel=1e-6
        )
        grads = tree("grads", i)
        np.testing.assert_allclose(
            global_norm(jax.tree.map(jnp.asarray, grads)), golden[f"{name}/grad_norm{i}"], rtol=1e-6
        )
        updates, opt_state = optimizer.tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        expected = tree("params", i + 1)
        np.testing.assert_allclose(params["a"], expected["a"], rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(params["b"]["c"], expected["b"]["c"], rtol=1e-6, atol=1e-8)


def test_moving_average_is_openpis(golden):
    agent = random_agent(make_config(ema_decay=0.99))
    prefix = "ema/decay0.99"
    # Any pytree will do for the parameters, so the golden's own is put in.
    average = {name: jnp.asarray(golden[f"{prefix}/ema0/{name}"]) for name in "ab"}
    for i in (1, 2, 3):
        new = {name: jnp.asarray(golden[f"{prefix}/new{i}/{name}"]) for name in "ab"}
        average = agent.replace(ema_params=average, policy_params=new).update_ema_parameters().ema_params
        for name in "ab":
            np.testing.assert_allclose(average[name], golden[f"{prefix}/ema{i}/{name}"], rtol=1e-6)


@dataclasses.dataclass(frozen=True)
class Momentum(OptimizerConfig):
    """An optimizer of a user's own: a transformation of optax as it comes."""

    decay: float = 0.9
    clip_gradient_norm: float = 1.0

    def transformations(self):
        return (optax.trace(self.decay),)


def test_an_optimizer_as_optax_has_it_stands_still_where_an_update_is_skipped():
    optimizer = create_optimizer(Momentum(), ConstantSchedule(0.1))
    params, grads = {"a": jnp.asarray([1.0, 2.0])}, {"a": jnp.asarray([0.3, -0.4])}
    state = optimizer.tx.init(params)
    params, state = optimizer.step(grads, state, params, enabled=jnp.asarray(True))
    np.testing.assert_allclose(params["a"], [0.97, 2.04], rtol=1e-6)
    broken = {"a": jnp.asarray([jnp.nan, jnp.inf])}
    same, same_state = optimizer.step(broken, state, params, enabled=jnp.asarray(False))
    assert_trees_identical((same, same_state), (params, state))
    params, state = optimizer.step(grads, state, params, enabled=jnp.asarray(True))
    np.testing.assert_allclose(params["a"], [0.97 - 0.1 * 0.57, 2.04 + 0.1 * 0.76], rtol=1e-6)


def test_equal_configs_give_the_same_optimizer():
    assert create_optimizer(AdamW(), ConstantSchedule(1e-3)) is create_optimizer(AdamW(), ConstantSchedule(1e-3))
    assert create_optimizer(AdamW(), ConstantSchedule(1e-3)) != create_optimizer(AdamW(), ConstantSchedule(1e-4))
