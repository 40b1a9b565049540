"""The agent: policy, critics, temperature and their optimizers as one immutable pytree, and its one step."""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from acrlpd.agents.accumulation import Params, compute_gradients
from acrlpd.agents.best_of_n import BestOfN, sample_candidates, select
from acrlpd.agents.critic_networks import CriticNetworks
from acrlpd.agents.hyperparams import LossWeights
from acrlpd.agents.joint_loss import (
    ALL_TERMS,
    CRITIC_TERMS,
    NO_TERMS,
    POLICY_TERMS,
    Draws,
    Networks,
    Terms,
    compute_targets,
    draw,
    joint_loss,
)
from acrlpd.agents.loss_functions import Algorithm
from acrlpd.agents.metrics import Info, global_norm, loss_info
from acrlpd.agents.optimizers.base import Optimizer
from acrlpd.agents.temperature import within_bounds
from acrlpd.agents.train_state import TrainState
from acrlpd.batch import Batch
from acrlpd.models.observation import Observation
from acrlpd.models.policy import FlowPolicy, draw_noise


class Agent(flax.struct.PyTreeNode):
    """Everything that learns, and how.

    Trainable policy parameters are float32 and have optimizer state and a moving average; frozen ones
    are bfloat16 and have neither. Static fields are hashable and equal for equal configs.
    """

    step: jax.Array  # int32 [] updates so far, skipped ones included
    skipped_updates: jax.Array  # int32 [] updates that a non-finite gradient cost

    policy_params: nnx.State
    frozen_params: nnx.State
    ema_params: nnx.State | None
    policy_opt_state: optax.OptState

    critics: CriticNetworks
    critic_opt_state: optax.OptState

    temperature_params: nnx.State
    temperature_opt_state: optax.OptState

    loss_weights: LossWeights  # float32 [] each; replace them to follow a schedule

    policy_def: nnx.GraphDef = flax.struct.field(pytree_node=False)
    temperature_def: nnx.GraphDef = flax.struct.field(pytree_node=False)
    algorithm: Algorithm = flax.struct.field(pytree_node=False)
    policy_optimizer: Optimizer = flax.struct.field(pytree_node=False)
    critic_optimizer: Optimizer = flax.struct.field(pytree_node=False)
    temperature_optimizer: Optimizer = flax.struct.field(pytree_node=False)
    gradient_accumulation_steps: int = flax.struct.field(pytree_node=False, default=1)

    # -- networks ------------------------------------------------------------------------------------

    def policy(self, *, use_ema: bool = False) -> FlowPolicy:
        """The policy as a module; the moving average where there is one and it is asked for."""
        average = use_ema and self.ema_params is not None
        params = self.ema_params if average else self.policy_params
        return nnx.merge(self.policy_def, params, self.frozen_params)

    def networks(self, params: Params | None = None) -> Networks:
        """The networks as modules, at the given parameters; a part that is None keeps the agent's own."""
        params = params or Params()
        policy = self.policy_params if params.policy is None else params.policy
        critic = self.critics.online if params.critic is None else params.critic
        temperature = self.temperature_params if params.temperature is None else params.temperature
        return Networks(
            policy=nnx.merge(self.policy_def, policy, self.frozen_params),
            critics=self.critics.replace(online=critic),
            temperature=nnx.merge(self.temperature_def, temperature),
        )

    # -- losses --------------------------------------------------------------------------------------

    def compute_critic_loss(self, batch: Batch, rng: jax.Array) -> tuple[jax.Array, Info]:
        """TD loss of the critics at the logged chunks."""
        return self._compute_loss(batch, rng, frozenset({"critic"}))

    def compute_actor_loss(self, batch: Batch, rng: jax.Array) -> tuple[jax.Array, Info]:
        """Policy improvement: the config's `actor_loss`."""
        return self._compute_loss(batch, rng, frozenset({"actor"}))

    def compute_bc_loss(self, batch: Batch, rng: jax.Array) -> tuple[jax.Array, Info]:
        """Flow matching on the logged actions."""
        return self._compute_loss(batch, rng, frozenset({"bc"}))

    def compute_loss(self, batch: Batch, rng: jax.Array) -> tuple[jax.Array, Info]:
        """The joint loss of an update; equal keys give the same noise as `train_step`."""
        return self._compute_loss(batch, rng, ALL_TERMS, self.loss_weights)

    def _compute_loss(
        self, batch: Batch, rng: jax.Array, terms: Terms, loss_weights: LossWeights | None = None
    ) -> tuple[jax.Array, Info]:
        networks = self.networks()
        batch, draws, subset_rng = self._prepare(batch, rng)
        targets = None
        if terms & CRITIC_TERMS:
            targets = compute_targets(self.algorithm, networks, batch, draws, subset_rng)
        loss_weights = loss_weights or LossWeights(1.0, 1.0, 1.0, 1.0)
        loss, (record, norm) = joint_loss(self.algorithm, networks, loss_weights, batch, draws, targets, terms)
        info = loss_info(self.algorithm, batch, record, norm, networks.temperature(), terms)
        return loss, info | {"total_loss": loss}

    @jax.named_scope("policy")
    def _prepare(self, batch: Batch, rng: jax.Array) -> tuple[Batch, Draws, jax.Array]:
        """Observations as the policy wants them, and all random numbers of the update.

        Only the current observation is augmented: the next one is a target, which is better without noise.
        """
        augment_rng, draw_rng, subset_rng = jax.random.split(rng, 3)
        policy, augment = self.policy(), self.algorithm.augment_images
        batch = dataclasses.replace(
            batch,
            observations=policy.preprocess(augment_rng, batch.observations, train=augment),
            next_observations=policy.preprocess(None, batch.next_observations, train=False),
        )
        return batch, draw(draw_rng, batch, self.algorithm.acrlpd.num_action_samples), subset_rng

    # -- the update ----------------------------------------------------------------------------------

    def train_step(self, batch: Batch, rng: jax.Array, *, update_policy: bool = True) -> tuple["Agent", Info]:
        """One update of policy, critics, temperature, targets and moving average. Pure.

        Without `update_policy` (critic warm-up, or a policy with nothing to train) only critics and
        temperature learn, and the policy's backward pass is not computed. Where the config gives the TD
        loss no weight, only the policy learns, and nothing about next observations is computed.
        """
        update_policy = update_policy and bool(jax.tree.leaves(self.policy_params))
        terms = POLICY_TERMS if update_policy else NO_TERMS
        terms |= CRITIC_TERMS if self.algorithm.has_critic else NO_TERMS
        params = Params(
            policy=self.policy_params if update_policy else None,
            critic=self.critics.online if self.algorithm.has_critic else None,
            temperature=self.temperature_params if self.algorithm.acrlpd.learnable_temperature else None,
        )
        batch, draws, subset_rng = self._prepare(batch, rng)
        loss, record, norm, grads = compute_gradients(
            self.algorithm,
            self.networks,
            params,
            self.loss_weights,
            batch,
            draws,
            subset_rng,
            terms,
            self.gradient_accumulation_steps,
        )
        agent, update_info = self._apply_gradients(params, grads)
        alpha = nnx.merge(self.temperature_def, self.temperature_params)()
        info = loss_info(self.algorithm, batch, record, norm, alpha, terms)
        return agent, info | update_info | {"total_loss": loss}

    @jax.named_scope("optimizer")
    def _apply_gradients(self, params: Params, grads: Params) -> tuple["Agent", Info]:
        """Steps every optimizer that has a gradient, targets and average; nothing if a gradient is not finite."""
        norms = {name: global_norm(getattr(grads, name)) for name in ("policy", "critic", "temperature")}
        finite = jnp.isfinite(sum(norms.values()))
        changed: dict[str, Any] = {}
        if params.policy is not None:
            changed["policy_params"], changed["policy_opt_state"] = self.policy_optimizer.step(
                grads.policy, self.policy_opt_state, params.policy, enabled=finite
            )
        online = self.critics.online
        if params.critic is not None:
            online, changed["critic_opt_state"] = self.critic_optimizer.step(
                grads.critic, self.critic_opt_state, params.critic, enabled=finite
            )
        if params.temperature is not None:
            temperature, changed["temperature_opt_state"] = self.temperature_optimizer.step(
                grads.temperature, self.temperature_opt_state, params.temperature, enabled=finite
            )
            changed["temperature_params"] = within_bounds(temperature)
        agent = self.replace(
            step=self.step + 1,
            skipped_updates=self.skipped_updates + (1 - finite.astype(jnp.int32)),
            critics=self.critics.replace(online=online),
            **changed,
        )
        if params.critic is not None:
            agent = agent.update_target_networks(enabled=finite)
        if params.policy is not None:
            agent = agent.update_ema_parameters(enabled=finite)
        return agent, self._update_info(agent, norms, finite)

    def _update_info(self, agent: "Agent", norms: dict[str, jax.Array], finite: jax.Array) -> Info:
        return {
            **{f"{name}_grad_norm": norm for name, norm in norms.items()},
            "policy_param_norm": global_norm(agent.policy_params),
            "critic_param_norm": global_norm(agent.critics.online),
            "policy_lr": self.policy_optimizer.learning_rate(self.policy_opt_state),
            "critic_lr": self.critic_optimizer.learning_rate(self.critic_opt_state),
            "temperature_lr": self.temperature_optimizer.learning_rate(self.temperature_opt_state),
            "bc_weight": jnp.asarray(self.loss_weights.bc_weight, jnp.float32),
            "update_skipped": 1.0 - finite.astype(jnp.float32),
            "skipped_updates": agent.skipped_updates,
        }

    def update_target_networks(self, *, enabled: jax.Array | bool = True) -> "Agent":
        """Moves the target critics a little towards the online ones."""
        tau = jnp.where(enabled, self.algorithm.acrlpd.target_update_tau, 0.0)
        return self.replace(critics=self.critics.soft_update_target_networks(tau))

    def update_ema_parameters(self, *, enabled: jax.Array | bool = True) -> "Agent":
        """Moves the policy's moving average towards its parameters, if there is one."""
        decay = self.algorithm.acrlpd.ema_decay
        if decay is None or self.ema_params is None:
            return self
        keep, add = jnp.where(enabled, decay, 1.0), jnp.where(enabled, 1 - decay, 0.0)
        average = jax.tree.map(lambda old, new: keep * old + add * new, self.ema_params, self.policy_params)
        return self.replace(ema_params=average)

    # -- acting --------------------------------------------------------------------------------------

    def sample_actions(
        self,
        rng: jax.Array,
        observation: Observation,
        *,
        num_samples: int | None = None,
        num_steps: int | None = None,
        use_ema: bool = True,
    ) -> jax.Array:
        """One action chunk per observation, [b, T, a]: the best of N candidates under the critics."""
        return self.best_of_n(rng, observation, num_samples=num_samples, num_steps=num_steps, use_ema=use_ema).actions

    def best_of_n(
        self,
        rng: jax.Array,
        observation: Observation,
        *,
        num_samples: int | None = None,
        num_steps: int | None = None,
        use_ema: bool = True,
    ) -> BestOfN:
        """As `sample_actions`, with all candidates and their values."""
        hyperparams = self.algorithm.acrlpd
        policy = self.policy(use_ema=use_ema)
        noise_rng, select_rng = jax.random.split(rng)
        observation = policy.preprocess(None, observation, train=False)
        context = policy.encode(observation, features=self.critics.uses_features)
        n = hyperparams.num_action_samples if num_samples is None else num_samples
        noise = draw_noise(noise_rng, (observation.state.shape[0], n, policy.action_horizon, policy.action_dim))
        candidates = sample_candidates(
            policy,
            context,
            noise,
            num_steps=hyperparams.sampling_steps if num_steps is None else num_steps,
            config=hyperparams.best_of_n,
            data_shards=self.algorithm.data_shards,
        )
        online, chunks = self.critics.online_ensemble, self.algorithm.critic_chunks(candidates)
        q_values = online.aggregate(online(context.features, jnp.asarray(observation.state), chunks))
        return select(
            candidates,
            q_values,
            rng=select_rng,
            config=hyperparams.best_of_n,
            temperature=nnx.merge(self.temperature_def, self.temperature_params)(),
            critic_chunks=chunks,
        )

    # -- openpi's view -------------------------------------------------------------------------------

    def to_train_state(self) -> TrainState:
        """The policy as openpi's own training loop would hold it."""
        average = self.ema_params
        return TrainState(
            step=self.step,
            params=self._full_params(self.policy_params),
            opt_state=self.policy_opt_state,
            ema_params=None if average is None else self._full_params(average),
            model_def=self.policy_def,
            ema_decay=self.algorithm.acrlpd.ema_decay,
        )

    def create_openpi_train_state(self) -> TrainState:
        """What openpi serves: the moving average where there is one, without optimizer state."""
        params = self.policy_params if self.ema_params is None else self.ema_params
        return TrainState(step=self.step, params=self._full_params(params), opt_state=None, model_def=self.policy_def)

    def create_train_state(self) -> TrainState:
        """The complete run: openpi's fields, and critics, temperature and counters beside them."""
        return self.to_train_state().replace(rl={name: getattr(self, name) for name in _RL_FIELDS})

    def update_from_train_state(self, state: TrainState) -> "Agent":
        """The agent that `create_train_state` was called on."""
        average = self.ema_params
        if average is not None and state.ema_params is None:
            raise ValueError("this agent keeps a moving average of the policy; the train state has none")
        return self.replace(
            step=state.step,
            policy_params=_like(state.params, self.policy_params),
            frozen_params=_like(state.params, self.frozen_params),
            ema_params=None if average is None else _like(state.ema_params, average),
            policy_opt_state=state.opt_state,
            **state.rl,
        )

    def _full_params(self, trainable: nnx.State) -> nnx.State:
        return nnx.merge_state(trainable, self.frozen_params)


_RL_FIELDS = (
    "skipped_updates",
    "critics",
    "critic_opt_state",
    "temperature_params",
    "temperature_opt_state",
    "loss_weights",
)


def _like(state: nnx.State | None, template: nnx.State) -> nnx.State:
    """The leaves of `state` that `template` has."""
    assert state is not None
    flat = dict(nnx.to_flat_state(state))
    return nnx.from_flat_state({path: flat[path] for path, _ in nnx.to_flat_state(template)})


@functools.partial(jax.jit, static_argnames="update_policy", donate_argnames="agent")
def train_step(agent: Agent, batch: Batch, rng: jax.Array, *, update_policy: bool = True) -> tuple[Agent, Info]:
    """`Agent.train_step`, compiled; the agent that is passed in is used up."""
    return agent.train_step(batch, rng, update_policy=update_policy)


# For networks whose kernels take microseconds, on a GPU: cuBLASLt applies bias and GELU to a product while it writes
# it (after Triton's products, a kernel of its own takes as long again), and what does not depend on each other runs
# side by side. Other backends know these options and have no use for them.
_SMALL_NETWORK_OPTIONS = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_enable_cublaslt": True,
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
}


@functools.partial(
    jax.jit,
    static_argnames="update_policy",
    donate_argnames="agent",
    compiler_options=_SMALL_NETWORK_OPTIONS,
)
def train_steps(agent: Agent, batches: Batch, rng: jax.Array, *, update_policy: bool = True) -> tuple[Agent, Info]:
    """As many updates as `batches` has on its leading axis, in one call; reports the last one.

    For small policies, whose updates are shorter than a dispatch from Python and whose metrics cost as
    much as their gradients: nobody reads those of the other updates, so they are not computed.
    """

    def update(agent: Agent, batch: Batch) -> tuple[Agent, Info]:
        return agent.train_step(batch, jax.random.fold_in(rng, agent.step), update_policy=update_policy)

    first, last = jax.tree.map(lambda x: x[:-1], batches), jax.tree.map(lambda x: x[-1], batches)
    agent, _ = jax.lax.scan(lambda agent, batch: (update(agent, batch)[0], None), agent, first)
    return update(agent, last)
