"""The agent: policy, critics, temperature and their optimizers as one immutable pytree, and its one step."""

import functools

import flax.struct
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from acrlpd.agents import algorithm
from acrlpd.agents.algorithm import Algorithm
from acrlpd.agents.best_of_n import BestOfN, select, take_candidate
from acrlpd.agents.hyperparams import LossWeights
from acrlpd.agents.improvements.base import Info
from acrlpd.agents.networks import CriticNetworks, Networks, Params
from acrlpd.agents.optimizers.base import Optimizer
from acrlpd.batch import Batch
from acrlpd.models.observation import Observation
from acrlpd.models.policy import FlowPolicy, draw_noise


class Agent(flax.struct.PyTreeNode):
    """Everything that learns, and how.

    Trainable parameters of the policy are float32 and have optimizer state and a moving average. Frozen parameters are
    bfloat16, without optimizer state and average. Static fields are hashable and equal for equal configs.
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

    improvement_params: nnx.State  # of the improvement's own networks; empty for most improvements
    improvement_opt_state: optax.OptState

    loss_weights: LossWeights  # float32 [] each; replace them to follow a schedule

    policy_def: nnx.GraphDef = flax.struct.field(pytree_node=False)
    temperature_def: nnx.GraphDef = flax.struct.field(pytree_node=False)
    improvement_def: nnx.GraphDef | None = flax.struct.field(pytree_node=False)
    algorithm: Algorithm = flax.struct.field(pytree_node=False)
    policy_optimizer: Optimizer = flax.struct.field(pytree_node=False)
    critic_optimizer: Optimizer = flax.struct.field(pytree_node=False)
    temperature_optimizer: Optimizer = flax.struct.field(pytree_node=False)
    gradient_accumulation_steps: int = flax.struct.field(pytree_node=False, default=1)

    # -- networks ------------------------------------------------------------------------------------

    def policy(self, *, use_ema: bool = False) -> FlowPolicy:
        """The policy as a module; its moving average where there is an average and the caller asks for it."""
        params = self.ema_params if use_ema and self.ema_params is not None else self.policy_params
        return nnx.merge(self.policy_def, params, self.frozen_params)

    def networks(self, params: Params | None = None, *, use_ema: bool = False) -> Networks:
        """The networks as modules, at the given parameters; a part that is None keeps the agent's own."""
        params = params or Params()
        policy = self.policy(use_ema=use_ema)
        if params.policy is not None:
            policy = nnx.merge(self.policy_def, params.policy, self.frozen_params)
        critic = self.critics.online if params.critic is None else params.critic
        temperature = self.temperature_params if params.temperature is None else params.temperature
        improvement = self.improvement_params if params.improvement is None else params.improvement
        return Networks(
            policy=policy,
            critics=self.critics.replace(online=critic),
            temperature=nnx.merge(self.temperature_def, temperature),
            improvement=None if self.improvement_def is None else nnx.merge(self.improvement_def, improvement),
        )

    # -- learning: algorithm.py ----------------------------------------------------------------------

    def compute_loss(self, batch: Batch, rng: jax.Array) -> tuple[jax.Array, Info]:
        """The loss of an update that is not made; equal keys give the same noise as `train_step`."""
        return algorithm.compute_loss(self, batch, rng)

    def train_step(self, batch: Batch, rng: jax.Array, *, update_policy: bool = True) -> tuple["Agent", Info]:
        """One update of everything that learns; see `algorithm.update`."""
        return algorithm.update(self, batch, rng, update_policy=update_policy)

    def update_ema_parameters(self, *, enabled: jax.Array | bool = True) -> "Agent":
        """EMA <- d EMA + (1 - d) policy, if the agent keeps an average."""
        decay = self.algorithm.acrlpd.ema_decay
        if decay is None or self.ema_params is None:
            return self
        keep, add = jnp.where(enabled, decay, 1.0), jnp.where(enabled, 1 - decay, 0.0)
        average = jax.tree.map(lambda old, new: keep * old + add * new, self.ema_params, self.policy_params)
        return self.replace(ema_params=average)

    # -- acting --------------------------------------------------------------------------------------

    def best_of_n(
        self,
        rng: jax.Array,
        observation: Observation,
        *,
        num_samples: int | None = None,
        use_ema: bool = True,
    ) -> BestOfN:
        """One action chunk per observation: the best of N candidates under the critics, and all candidates."""
        setting, networks = self.algorithm, self.networks(use_ema=use_ema)
        policy = networks.policy
        noise_rng, select_rng = jax.random.split(rng)
        observation = policy.preprocess(None, observation, train=False)
        context = networks.encode(observation)
        n = setting.acrlpd.num_action_samples if num_samples is None else num_samples
        noise = draw_noise(noise_rng, (observation.state.shape[0], n, policy.action_horizon, policy.action_dim))
        candidates = setting.candidates(networks, context, observation, noise)
        q_values = setting.values(networks, context, observation, candidates)
        index = select(
            q_values,
            rng=select_rng,
            config=setting.acrlpd.best_of_n,
            temperature=networks.temperature(),
            critic_chunks=setting.critic_chunks(candidates),
        )
        return BestOfN(take_candidate(candidates, index), index, q_values, candidates)

    def served_params(self) -> nnx.State:
        """The whole policy under openpi's names, as openpi serves it: the moving average where there is one."""
        params = self.policy_params if self.ema_params is None else self.ema_params
        return nnx.merge_state(params, self.frozen_params)


@functools.partial(jax.jit, static_argnames="update_policy", donate_argnames="agent")
def train_step(agent: Agent, batch: Batch, rng: jax.Array, *, update_policy: bool = True) -> tuple[Agent, Info]:
    """`Agent.train_step`, compiled; the agent that is passed in is used up.

    The key of an update is `rng` folded with the agent's step, so one key serves a whole run.
    """
    return agent.train_step(batch, jax.random.fold_in(rng, agent.step), update_policy=update_policy)


# For networks whose kernels take microseconds on a GPU. cuBLASLt applies bias and GELU while it writes a product; after
# a product of Triton another kernel does this and takes as long again. Independent kernels run side by side. Other
# backends accept these options and ignore them.
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

    For small policies, whose updates are shorter than a dispatch from Python and whose metrics cost as much as their
    gradients: the metrics of all updates but the last are not computed.
    """

    def update(agent: Agent, batch: Batch) -> tuple[Agent, Info]:
        return agent.train_step(batch, jax.random.fold_in(rng, agent.step), update_policy=update_policy)

    first, last = jax.tree.map(lambda x: x[:-1], batches), jax.tree.map(lambda x: x[-1], batches)
    agent, _ = jax.lax.scan(lambda agent, batch: (update(agent, batch)[0], None), agent, first)
    return update(agent, last)
