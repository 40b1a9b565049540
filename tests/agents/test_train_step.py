"""The update as a whole: exact, pure, compiled once, and safe."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_helpers import (
    QUICK,
    assert_trees_close,
    assert_trees_identical,
    make_batch,
    make_config,
    quick_call,
    quick_jit,
    random_like,
)
from jax.extend.core import jaxpr_as_fun

from acrlpd.agents import Call, train_step, train_steps
from acrlpd.agents.accumulation import compute_gradients
from acrlpd.agents.algorithm import JointLoss, compute_loss
from acrlpd.agents.improvements.distillation import Distillation
from acrlpd.agents.improvements.dsrl import DSRL
from acrlpd.agents.improvements.expo import EXPO
from acrlpd.agents.metrics import loss_info
from acrlpd.agents.networks import Params, draw
from acrlpd.agents.schedules.constant import ConstantSchedule
from acrlpd.batch import StackedBatches
from acrlpd.config import LossWeights, QChunkingConfig
from acrlpd.config.create_agent import create_agent
from acrlpd.config.plan.flops import count_flops
from acrlpd.models.families.gaussian import GaussianPolicyConfig
from acrlpd.models.families.state_flow import StateFlowPolicyConfig

KEY = jax.random.key(5)
INFO_KEYS = {
    "critic_loss", "actor_loss", "bc_loss", "alpha_loss", "total_loss", "q_mean", "q_std", "target_q_mean",
    "td_error_mean", "alpha_value", "choice_entropy", "valid_samples", "mask_ratio", "q_ensemble_std",
    "advantage_mean", "advantage_std", "awr_weight_mean", "awr_weight_max", "awr_effective_ratio",
    "best_of_n_gain", "candidate_diversity", "policy_grad_norm", "critic_grad_norm", "temperature_grad_norm",
    "policy_param_norm", "critic_param_norm", "policy_lr", "critic_lr", "temperature_lr", "skipped_updates",
    "update_skipped", "valid_step_ratio", "bootstrap_ratio", "bc_weight", "candidate_q_std", "reward_mean",
    "reward_min", "reward_max", "actor_weight",
}  # fmt: skip


FROZEN = LossWeights(actor_weight=0.7, bc_weight=0.0)
GAUSSIAN = GaussianPolicyConfig(state_dim=6, action_dim=3, action_horizon=4, hidden_dims=(32,))


def build(config):
    shapes = jax.eval_shape(lambda key: create_agent(config, key), KEY)
    agent = random_like(shapes)
    # Random optimizer states would be no optimizer's; the moving average starts as a copy.
    return agent.replace(
        ema_params=jax.tree.map(jnp.copy, agent.policy_params),
        policy_opt_state=agent.policy_optimizer.tx.init(agent.policy_params),
        critic_opt_state=agent.critic_optimizer.tx.init(agent.critics.online),
        temperature_opt_state=agent.temperature_optimizer.tx.init(agent.temperature_params),
        loss_weights=jax.tree.map(lambda w: jnp.asarray(w, jnp.float32), config.acrlpd.loss_weights),
    )


@pytest.fixture(scope="module")
def config():
    return make_config()


@pytest.fixture
def agent(config):
    return build(config)


@pytest.fixture(scope="module")
def batch(config):
    return make_batch(config, 16)


def copy(tree):
    return jax.tree.map(jnp.copy, tree)


def avals(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)


def test_compiles_once_and_keeps_types_and_shardings(agent, config):
    """Twenty updates, one program; the state that comes out is of the kind that went in."""
    before, structure = avals(agent), jax.tree.structure(agent)
    shardings = jax.tree.map(lambda x: x.sharding, agent)
    train_step.clear_cache()
    for i in range(20):
        agent, info = train_step(agent, make_batch(config, 16, seed=i), KEY)
        if i == 7:  # a schedule moves the weights
            agent = agent.replace(
                loss_weights=dataclasses.replace(agent.loss_weights, bc_weight=jnp.asarray(0.1, jnp.float32))
            )
    assert train_step._cache_size() == 1
    assert jax.tree.structure(agent) == structure
    assert avals(agent) == before
    assert jax.tree.map(lambda x: x.sharding, agent) == shardings
    assert not any(leaf.weak_type for leaf in jax.tree.leaves((agent, info)))
    assert int(agent.step) == 20 and int(agent.skipped_updates) == 0
    assert set(info) == INFO_KEYS
    assert all(np.isfinite(value) and value.shape == () for value in info.values())


def test_equal_configs_share_the_compiled_step(config, batch):
    train_step(build(config), batch, KEY)
    before = train_step._cache_size()
    train_step(build(make_config()), batch, KEY)
    assert train_step._cache_size() == before


def test_donated_buffers_are_freed(agent, batch):
    leaves = jax.tree.leaves(agent)
    pointers = {leaf.unsafe_buffer_pointer() for leaf in leaves}
    new, _ = train_step(agent, batch, KEY)
    assert all(leaf.is_deleted() for leaf in leaves)
    reused = [leaf for leaf in jax.tree.leaves(new) if leaf.unsafe_buffer_pointer() in pointers]
    assert len(reused) == len(leaves)  # in place: nothing was allocated for the new state


@pytest.mark.slow
def test_an_update_needs_memory_for_gradients_but_not_for_a_second_state():
    """The guard against non-finite gradients must not keep the old state beside the new one."""
    model = StateFlowPolicyConfig(state_dim=6, action_dim=3, action_horizon=4, hidden_dims=(1024, 1024, 1024))
    config = make_config(model=model, loss_weights=LossWeights(actor_weight=0.0, bc_weight=1.0))
    shapes = jax.eval_shape(lambda key: create_agent(config, key), KEY)
    memory = train_step.lower(shapes, make_batch(config, 16), KEY).compile().memory_analysis()
    parameters = sum(4 * leaf.size for leaf in jax.tree.leaves(shapes.policy_params))
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    assert memory.alias_size_in_bytes >= state
    assert memory.temp_size_in_bytes < 2.2 * parameters


def test_same_key_and_batch_give_the_same_bits(agent, batch):
    first, first_info = train_step(copy(agent), batch, KEY)
    second, second_info = train_step(copy(agent), batch, KEY)
    assert_trees_identical((first, first_info), (second, second_info))
    other, _ = train_step(agent, batch, jax.random.key(6))
    assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (first, other)), strict=True))


def test_reported_losses_are_the_computed_ones(agent, batch):
    loss, expected = quick_jit(lambda a, b: a.compute_loss(b, KEY))(agent, batch)
    _, info = train_step(agent, batch, KEY)
    for name, value in expected.items():
        np.testing.assert_allclose(info[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    w = LossWeights(critic_weight=1.0, actor_weight=0.7, bc_weight=0.5, alpha_weight=0.3)
    total = w.critic_weight * info["critic_loss"] + w.actor_weight * info["actor_loss"]
    total += w.bc_weight * info["bc_loss"] + w.alpha_weight * info["alpha_loss"]
    np.testing.assert_allclose(total, loss, rtol=1e-5)
    assert float(info["valid_samples"]) == float(batch.sequence_mask.sum())


def test_targets_and_average_follow(agent, batch):
    old = copy(agent)
    new, _ = train_step(agent, batch, KEY)
    tau, decay = 0.005, 0.999
    for target, previous, online in zip(
        *map(jax.tree.leaves, (new.critics.target, old.critics.target, new.critics.online)), strict=True
    ):
        np.testing.assert_allclose(target, (1 - tau) * previous + tau * online, rtol=1e-5, atol=1e-7)
    for average, previous, params in zip(
        *map(jax.tree.leaves, (new.ema_params, old.ema_params, new.policy_params)), strict=True
    ):
        np.testing.assert_allclose(average, decay * previous + (1 - decay) * params, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "changes",
    [
        {"improvement": "awr", "bc_importance_weighting": True, "bc_difficulty_weighting": True},
        {"improvement": "best_of_n"},
        {"improvement": "policy_gradient"},
        {"improvement": Distillation(hidden_dims=(16,))},
        {"improvement": EXPO(hidden_dims=(16,)), "learnable_temperature": False},
        {"improvement": DSRL(hidden_dims=(16,)), "learnable_temperature": False, "loss_weights": FROZEN},
        {"improvement": "sac", "model": GAUSSIAN, "learnable_temperature": False},
    ],
    ids=lambda changes: str(changes["improvement"]),
)
def test_accumulated_gradients_equal_the_large_batch(changes):
    """Windows of unequal length and weight, critics with dropout: the normalisers must be the batch's."""
    config = make_config(critic={"dropout_rate": 0.2, "target_subset_size": 2}, **changes)
    agent, batch = build(config), make_batch(config, 12)
    params = Params(agent.policy_params, agent.critics.online, agent.temperature_params, agent.improvement.params)
    draws = draw(KEY, batch, config.acrlpd)

    @functools.partial(quick_jit, static_argnums=1)
    def gradients(params, parts):
        joint = JointLoss(agent, KEY, trains_policy=True)
        loss, whole, targets, grads = compute_gradients(joint, params, (batch, draws), parts)
        return loss, loss_info(agent.algorithm, batch, *whole, targets, jnp.ones(())), grads

    assert_trees_close(gradients(params, 3), gradients(params, 1), rtol=2e-4, atol=2e-6)


def test_accumulation_inside_the_step(batch, agent):
    whole, whole_info = train_step(agent, batch, KEY)
    accumulated, info = quick_call(train_step, build(make_config(accumulation=4)), batch, KEY)
    assert_trees_close(info, whole_info, rtol=2e-4, atol=2e-6)
    # After one step Adam's first moment is the clipped gradient; the parameters only show its sign.
    for name in ("policy_opt_state", "critic_opt_state"):
        moments = [getattr(state, name)[1][0].mu for state in (accumulated, whole)]
        assert_trees_close(*moments, rtol=1e-3, atol=1e-6)


def test_accumulation_must_divide_the_batch(batch):
    with pytest.raises(ValueError, match="16 samples cannot be split into 5"):
        train_step(build(make_config(accumulation=5)), batch, KEY)


def test_non_finite_gradients_are_skipped_and_counted(agent, batch):
    old = copy(agent)
    poisoned = batch.replace(rewards=batch.rewards.at[0, 0].set(jnp.nan), sequence_mask=jnp.ones(16))
    agent, info = train_step(agent, poisoned, KEY)
    assert int(agent.step) == 1 and int(agent.skipped_updates) == 1
    assert float(info["update_skipped"]) == 1.0 and int(info["skipped_updates"]) == 1
    unchanged = {"step": old.step, "skipped_updates": old.skipped_updates}
    assert_trees_identical(agent.replace(**unchanged), old)
    agent, info = train_step(agent, batch, KEY)
    assert int(agent.step) == 2 and int(agent.skipped_updates) == 1
    assert float(info["update_skipped"]) == 0.0
    assert np.any(jax.tree.leaves(agent.policy_params)[0] != jax.tree.leaves(old.policy_params)[0])


def test_candidates_of_equal_value_leave_the_temperature_alone(batch):
    """Critics that value all chunks alike say nothing about alpha, however fast alpha learns."""
    config = dataclasses.replace(make_config(), temperature_lr_schedule=ConstantSchedule(20.0))
    agent = build(config)
    agent = agent.replace(critics=jax.tree.map(jnp.zeros_like, agent.critics))
    before = float(agent.networks().temperature())
    agent, info = quick_call(train_step, agent, batch, KEY, update_policy=False)
    assert float(info["temperature_grad_norm"]) == 0 and float(info["update_skipped"]) == 0
    assert float(agent.networks().temperature()) == before


def test_critic_only_updates_leave_the_policy_alone(agent, batch):
    old = copy(agent)
    new, info = quick_call(train_step, agent, batch, KEY, update_policy=False)
    assert_trees_identical(
        (new.policy_params, new.ema_params, new.policy_opt_state),
        (old.policy_params, old.ema_params, old.policy_opt_state),
    )
    joint, joint_info = train_step(copy(old), batch, KEY)
    assert_trees_close(new.critics, joint.critics)
    assert_trees_close(new.temperature_params, joint.temperature_params)
    # What was not computed is not reported.
    assert set(info) < set(joint_info) and {"bc_loss", "actor_loss", "advantage_mean"} <= set(joint_info) - set(info)
    np.testing.assert_allclose(info["critic_loss"], joint_info["critic_loss"], rtol=1e-5)
    assert float(info["policy_grad_norm"]) == 0.0


def test_critic_only_updates_are_cheaper(agent, batch):
    """The policy's backward pass, its optimizer and the candidates of the baseline are not computed."""

    def flops(update_policy):
        return train_step.lower(agent, batch, KEY, update_policy=update_policy).cost_analysis()["flops"]

    assert flops(False) < 0.75 * flops(True)


def test_critics_may_learn_more_often_than_the_policy(batch):
    """Every third update is the joint one, the others are those of the critics alone, whatever the calls are."""
    config, changes = make_config(), {"improvement": Distillation(hidden_dims=(16,)), "learnable_temperature": False}
    every_third, plain = (build(make_config(critic_updates_per_policy_update=k, **changes)) for k in (3, 1))
    plain, every_third = (
        agent.replace(improvement=agent.improvement.replace(opt_state=opt_state))
        for agent in (plain, every_third)
        for opt_state in [agent.critic_optimizer.tx.init(agent.improvement.params)]
    )
    batches = [make_batch(config, 16, seed=i) for i in range(4)]
    feed = StackedBatches(jax.tree.map(lambda *x: jnp.stack(x), *batches), 4)
    bc_weights = jnp.full(4, 0.5)
    steps = jax.jit(train_steps).lower([every_third], [Call(feed, bc_weights, KEY)], 0).compile(compiler_options=QUICK)
    [after], table = steps([copy(every_third)], [Call(feed, bc_weights, KEY)], 4)
    rows = table.rows(4)
    alone, both = (
        train_step.lower(plain, batch, KEY, update_policy=update_policy).compile(QUICK)
        for update_policy in (False, True)
    )
    for i, (step, one) in enumerate(zip((alone, alone, both, alone), batches, strict=True)):
        plain, info = step(plain, one, KEY)
        of_policy = {"policy_grad_norm", "improvement_grad_norm", "alpha_value"}  # alpha may be the improvement's
        expected = set(info) if step is both else set(info) - of_policy
        assert set(rows[i]) == expected
        np.testing.assert_allclose(rows[i]["critic_loss"], info["critic_loss"], rtol=1e-4)
    assert int(after.step) == 4
    for name in ("policy_params", "ema_params", "critics", "improvement"):
        assert_trees_close(getattr(after, name), getattr(plain, name), rtol=1e-3, atol=1e-5)
    [few], _ = steps([copy(every_third)], [Call(feed, bc_weights, KEY)], 2)
    assert_trees_identical(few.policy_params, every_third.policy_params)
    assert_trees_identical(few.improvement, every_third.improvement)


def test_the_backward_pass_of_the_policy_is_not_computed_between_its_updates(batch):
    agent = build(make_config(critic_updates_per_policy_update=5))

    def flops(update_policy):
        return sum(count_flops(lambda a, b: a.train_step(b, KEY, update_policy=update_policy), agent, batch).values())

    jaxpr = jax.make_jaxpr(lambda agent, batch: agent.train_step(batch, KEY))(agent, batch)
    [choice] = [equation for equation in jaxpr.eqns if equation.primitive.name == "cond"]
    of_critics, of_both = (
        sum(count_flops(jaxpr_as_fun(branch), *branch.in_avals).values()) for branch in choice.params["branches"]
    )
    assert of_both == flops(True) and of_critics == flops(False) < 0.75 * of_both


BC_WEIGHTS = jnp.linspace(0.1, 0.4, 4, dtype=jnp.float32)


@pytest.fixture(scope="module")
def feed(config):
    batches = [make_batch(config, 16, seed=i) for i in range(4)]
    return StackedBatches(jax.tree.map(lambda *x: jnp.stack(x), *batches), len(batches))


@pytest.fixture(scope="module")
def many_steps(config, feed):
    """`train_steps`, compiled once for calls of any length."""
    arguments = ([build(config)], [Call(feed, BC_WEIGHTS, KEY)], 0)
    return jax.jit(train_steps).lower(*arguments).compile(compiler_options=QUICK)


def test_a_call_of_many_updates_equals_single_updates(agent, feed, many_steps):
    [together], table = many_steps([agent], [Call(feed, BC_WEIGHTS, KEY)], 3)
    rows = table.rows(3)
    for i, weight in enumerate(BC_WEIGHTS[:3]):
        agent = agent.replace(loss_weights=dataclasses.replace(agent.loss_weights, bc_weight=weight))
        agent, info = train_step(copy(agent), feed.batch(i), KEY)
        assert rows[i].keys() == info.keys() and rows[i]["bc_weight"] == weight
        assert_trees_close(rows[i], jax.tree.map(float, info), rtol=1e-4, atol=1e-5)
    assert_trees_close(together.critics.online, agent.critics.online, rtol=1e-3, atol=1e-5)
    assert int(together.step) == 3


def test_the_lengths_of_calls_do_not_change_a_bit(agent, feed, many_steps):
    """Calls of 1 and 3 updates make what one call of 4 makes, updates that are skipped included."""
    rewards = feed.batches.rewards.at[2].set(jnp.nan)
    feed = feed.replace(batches=dataclasses.replace(feed.batches, rewards=rewards))
    [together], table = many_steps([agent], [Call(feed, BC_WEIGHTS, KEY)], 4)
    rows = table.rows(4)
    assert [row["update_skipped"] for row in rows] == [0, 0, 1, 0] and rows[3]["skipped_updates"] == 1
    apart, found = agent, []
    for start, length in ((0, 1), (1, 3)):
        later = jax.tree.map(lambda x, start=start: jnp.roll(x, -start, axis=0), (feed, BC_WEIGHTS))
        [apart], table = many_steps([apart], [Call(*later, KEY)], length)
        found += table.rows(length)
    np.testing.assert_equal(found, rows)
    jax.tree.map(np.testing.assert_array_equal, apart, together)


def test_without_actor_loss_nothing_of_it_is_computed(batch):
    """Plain Q-chunking: one set of candidates per update instead of two."""

    def flops(weights):
        agent = build(make_config(loss_weights=weights, num_action_samples=32))
        return train_step.lower(agent, batch, KEY).cost_analysis()["flops"]

    assert flops(LossWeights(actor_weight=0.0, bc_weight=1.0)) < 0.6 * flops(LossWeights(actor_weight=1.0))


def test_openpi_is_served_the_moving_average(agent):
    agent = agent.replace(ema_params=jax.tree.map(lambda x: x + 1, agent.policy_params))
    assert_trees_identical(agent.served_params(), agent.ema_params)
    assert_trees_identical(replace_without_average(agent).served_params(), agent.policy_params)


def replace_without_average(agent):
    algorithm = dataclasses.replace(agent.algorithm, acrlpd=dataclasses.replace(agent.algorithm.acrlpd, ema_decay=None))
    return agent.replace(ema_params=None, algorithm=algorithm)


def test_the_mean_reward_is_that_of_a_step_also_with_n_step_returns():
    """Five rewards and one action: `valid` says nothing about four of the rewards."""
    model = dataclasses.replace(make_config().model, action_horizon=1)
    chunking = QChunkingConfig(horizon_length=5, action_dim=2, critic_action_horizon=1)
    config = make_config(model=model, qchunking=chunking)
    batch = make_batch(config, 6, all_valid=True)
    batch = dataclasses.replace(batch, rewards=jnp.full((6, 5), -2.0))
    _, info = quick_jit(compute_loss)(build(config), batch, KEY)
    assert info["reward_mean"] == pytest.approx(-2.0)
