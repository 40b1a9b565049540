"""One update of policy and critics, from top to bottom: docs/algorithm.md as code, in its order and with its symbols.

    1. target       y = sum_i gamma^i r_i + gamma^H mask V(s'), where V(s') is one of the files in backups/
    2. critics      Q_e(s, c) is regressed to y at the logged chunk c
    3. cloning      the policy's flow matching on the logged actions
    4. improvement  one of the files in improvements/
    5. temperature  alpha, where it is learned: as even a choice among the candidates as the config asks for
    6. update       one gradient of the weighted sum, then one step of each optimizer, of the targets and of the average

What several of these need is computed once. The prefix of s is encoded once, with gradient, for cloning and the
improvement; critics and candidates get the same context without gradient. The prefix of s' is encoded once, before
anything is differentiated, and only if the target needs it.

The named scopes say what an operation is for; a profile adds up time by the innermost scope.
"""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import flax.struct
import jax
import jax.numpy as jnp

from acrlpd.agents.accumulation import compute_gradients, loss_in_one_piece
from acrlpd.agents.backups.base import Backup, Targets
from acrlpd.agents.backups.best_of_n import BestOfN
from acrlpd.agents.best_of_n import sample_candidates
from acrlpd.agents.hyperparams import ACRLPDHyperparams, QChunkingConfig
from acrlpd.agents.improvements.awr import AWR
from acrlpd.agents.improvements.base import Improvement, Info, SampleWeights, View
from acrlpd.agents.metrics import NOT_COMPUTED, SampleRecord, global_norm, loss_info, update_info
from acrlpd.agents.networks import Draws, Networks, Params, Prepared, draw
from acrlpd.agents.policy_data import cloning_weights, select_policy_data
from acrlpd.agents.td_loss import ensemble_td_loss
from acrlpd.agents.temperature import follow_choice, largest_log_weight
from acrlpd.batch import Batch
from acrlpd.models.augmentation import AugmentationLevel
from acrlpd.models.observation import Array, Observation
from acrlpd.models.policy import Context, FlowPolicy

if TYPE_CHECKING:
    from acrlpd.agents.agent import Agent


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """What an update does, apart from networks and arrays: static under jit."""

    acrlpd: ACRLPDHyperparams
    qchunking: QChunkingConfig
    improvement: Improvement = AWR()  # noqa: RUF009 (frozen)
    backup: Backup = BestOfN()  # noqa: RUF009 (frozen)
    # Whether the images of the current observation are augmented.
    augment_images: bool = True
    augmentation_level: AugmentationLevel = "standard"
    # Devices that share a batch, for the memory estimate of best-of-N.
    data_shards: int = 1

    @property
    def has_critic(self) -> bool:
        """Whether the critics learn; without critics, training is cloning."""
        return self.acrlpd.loss_weights.critic_weight != 0

    @property
    def has_improvement(self) -> bool:
        """False for plain Q-chunking: the policy is cloned, and improved only by choosing among candidates."""
        return self.acrlpd.loss_weights.actor_weight != 0

    @property
    def judges_noise(self) -> bool:
        """Whether critics judge the noise that chunks are made from, in place of the chunks."""
        return self.has_improvement and self.improvement.judges_noise

    @property
    def target_entropy(self) -> float:
        if self.acrlpd.target_entropy is not None:
            return self.acrlpd.target_entropy
        return -self.acrlpd.target_entropy_multiplier * self.qchunking.action_dim

    def seen_actions(self, actions: Array) -> jax.Array:
        """What critics see of actions [..., T, a]: the first C steps and the real dims."""
        return jnp.asarray(actions)[..., : self.qchunking.chunk_length, : self.qchunking.action_dim]

    def critic_chunks(self, actions: Array) -> jax.Array:
        """`seen_actions`, flattened: c."""
        seen = self.seen_actions(actions)
        return seen.reshape(*seen.shape[:-2], -1)

    @jax.named_scope("sampling")
    def candidates(
        self,
        networks: Networks,
        context: Context,
        observation: Observation,
        noise: jax.Array,
        *,
        num_steps: int | None = None,
    ) -> jax.Array:
        """N action chunks [b, N, T, a] from noise [b, N, T, a], in K denoising steps."""
        sample = functools.partial(
            sample_candidates,
            networks.policy,
            self.acting_context(networks.policy, context, observation),
            num_steps=self.acrlpd.sampling_steps if num_steps is None else num_steps,
            config=self.acrlpd.best_of_n,
            data_shards=self.data_shards,
        )

        def denoise(noise: jax.Array) -> jax.Array:
            return self.clip(sample(noise))

        if not self.has_improvement:  # so the improvement's own networks have not learned
            return denoise(noise)
        return self.clip(self.improvement.propose(networks, context, observation, noise, denoise))

    def judged(
        self, networks: Networks, context: Context, observation: Observation, noise: jax.Array, candidates: jax.Array
    ) -> jax.Array:
        """What critics see of candidates [b, N, T, a] that were made of noise [b, N, T, a]: [b, N, c].

        Where critics judge noise, nothing depends on the candidates, and the compiler leaves their denoising out.
        """
        if self.judges_noise:
            return self.improvement.judged_noise(networks, context, observation, noise)
        return self.critic_chunks(candidates)

    def logged(self, batch: Batch) -> jax.Array:
        """What critics see of the logged chunks: [b, c]."""
        return jnp.asarray(batch.noise) if self.judges_noise else self.critic_chunks(batch.actions)

    def acting_context(self, policy: FlowPolicy, context: Context, observation: Observation) -> Context:
        """The context that candidates are denoised from."""
        return self.improvement.acting_context(policy, context, observation) if self.has_improvement else context

    def clip(self, actions: jax.Array) -> jax.Array:
        """Actions within the bounds of the robot, if the config names bounds."""
        bounds = self.acrlpd.action_bounds
        return actions if bounds is None else jnp.clip(actions, *bounds)

    def values(self, networks: Networks, context: Context, observation: Observation, actions: jax.Array) -> jax.Array:
        """agg_e Q_e(s, c) of actions [b, n, T, a] under the online critics: [b, n]."""
        if self.judges_noise:
            raise ValueError("the critics judge noise, so they have no values of actions; value candidates by `judged`")
        online = networks.critics.online_ensemble
        return online.aggregate(online(context.features, observation, self.critic_chunks(actions)))


# -- 1. target: backups/ -- 2. critics: td_loss.py -------------------------------------------------------


@jax.named_scope("critic")
def critic_loss(view: View, targets: Targets) -> tuple[jax.Array, jax.Array]:
    """Q at the logged chunk [b, E], and the TD loss of each sample [b]."""
    algorithm, critics = view.algorithm, view.networks.critics
    context = view.context if algorithm.acrlpd.critic_gradient_to_policy else view.fixed_context
    online = critics.online_ensemble
    logged = algorithm.logged(view.batch)
    q = online(context.features, view.batch.observations, logged[:, None], view.draws.dropout_keys)[:, 0]
    target = algorithm.backup.critic_targets(view, targets)
    return q, ensemble_td_loss(online, q, target, algorithm.acrlpd, algorithm.backup.error_weights)


# -- 3. cloning: policy_data.py -- 4. improvement: improvements/ -- 5. temperature: temperature.py ---------
# -- 6. update -------------------------------------------------------------------------------------------


@flax.struct.dataclass
class Weights:
    """How much each sample counts in the losses of the policy; None where the policy does not learn."""

    cloning: SampleWeights | None = None
    improvement: SampleWeights | None = None


@flax.struct.dataclass
class Normalizers:
    """What sums over samples are divided by: always of the whole batch."""

    samples: jax.Array
    critic: jax.Array  # samples that the critics may learn from
    cloning: tuple[jax.Array, jax.Array] | None  # (largest log weight, sum of weights times sizes)
    improvement: tuple[jax.Array, jax.Array] | None


@dataclasses.dataclass(frozen=True)
class JointLoss:
    """L = critic_weight L_critic + actor_weight L_actor + bc_weight L_BC + alpha_weight L_alpha, as a `BatchLoss`."""

    agent: "Agent"
    subset_rng: jax.Array
    trains_policy: bool  # False: only critics, networks that judge, and temperature learn

    @property
    def algorithm(self) -> Algorithm:
        return self.agent.algorithm

    def targets(self, params: Params, inputs: tuple[Batch, Draws]) -> Targets | None:
        if not self.algorithm.has_critic:
            return None
        networks = self.agent.networks(params).without_gradient()
        return self.algorithm.backup.targets(self.algorithm, networks, *inputs, self.subset_rng)

    def view(self, params: Params, inputs: tuple[Batch, Draws]) -> View:
        return View(self.algorithm, self.agent.networks(params), *inputs)

    @jax.named_scope("policy")
    def weigh(self, view: View) -> Weights:
        if not self.trains_policy:
            return Weights()
        improves, method = self.algorithm.has_improvement, self.algorithm.improvement
        clones = jax.tree.leaves(self.agent.policy_params) and not (improves and method.labels_prompts)
        cloning = cloning_weights(view) if clones else None
        improvement = method.weigh(view) if improves else None
        return Weights(cloning=cloning, improvement=improvement)

    def balance(self, inputs: tuple[Batch, Draws], weights: Weights) -> Weights:
        """What depends on the other samples: which windows the policy learns from, and how sharp weights are."""
        cloning, improvement, method = weights.cloning, weights.improvement, self.algorithm.improvement
        if cloning is not None:
            chosen = select_policy_data(self.algorithm.acrlpd, inputs[0], cloning)
            cloning = cloning if chosen is None else cloning.only(chosen)
            if improvement is not None and chosen is not None and method.clones_logged_actions:
                improvement = improvement.only(chosen)
        return Weights(cloning, None if improvement is None else method.balance(improvement))

    def normalize(self, inputs: tuple[Batch, Draws], weights: Weights) -> Normalizers:
        critic_weight = inputs[0].critic_weight
        total = jnp.sum(critic_weight)  # may be below 1, because importances may be
        return Normalizers(
            samples=jnp.asarray(critic_weight.shape[0], jnp.float32),
            critic=jnp.where(total > 0, total, 1.0),
            cloning=_normalizer(weights.cloning),
            improvement=_normalizer(weights.improvement),
        )

    @jax.named_scope("policy")
    def loss(
        self, view: View, targets: Targets | None, weights: Weights, norm: Normalizers
    ) -> tuple[jax.Array, SampleRecord]:
        algorithm, batch, loss_weights = self.algorithm, view.batch, self.agent.loss_weights
        total, record = jnp.zeros((), jnp.float32), SampleRecord()
        if targets is not None:
            q, td = critic_loss(view, targets)
            total += loss_weights.critic_weight * jnp.sum(td * batch.critic_weight) / norm.critic
            record = record.replace(q=q, td_loss=td)
            own = algorithm.backup.losses(view, targets, self.subset_rng)
            if own is not None:
                total += loss_weights.critic_weight * jnp.sum(own * batch.critic_weight) / norm.critic
                record = record.replace(backup=own)
        if targets is not None and targets.candidates is not None and algorithm.acrlpd.learnable_temperature:
            log_alpha, entropy = view.networks.temperature.log_alpha[...], algorithm.acrlpd.target_choice_entropy
            alpha_loss = follow_choice(log_alpha, targets.candidates.values, entropy)
            total += loss_weights.alpha_weight * jnp.sum(alpha_loss) / norm.samples
            record = record.replace(temperature=alpha_loss)
        if weights.cloning is not None:
            losses = jnp.sum(view.flow_losses * batch.valid, axis=1)
            weighted = _weight(weights.cloning, norm.cloning) * losses
            total += loss_weights.bc_weight * jnp.sum(weighted)
            record = record.replace(cloning=weighted)
        if weights.improvement is not None:
            losses = algorithm.improvement.losses(view, weights.improvement)
            weighted = _weight(weights.improvement, norm.improvement) * losses
            total += loss_weights.actor_weight * jnp.sum(weighted)
            record = record.replace(improvement=weighted)
        judged = algorithm.improvement.judge(view) if algorithm.has_improvement else None
        if judged is not None:
            total += loss_weights.actor_weight * jnp.sum(judged) / norm.samples
            record = record.replace(judge=judged)
        return total, record


def _normalizer(weights: SampleWeights | None) -> tuple[jax.Array, jax.Array] | None:
    """The largest log weight, which keeps exp() in range and cancels out, and the sum of weights times sizes."""
    if weights is None:
        return None
    largest = largest_log_weight(weights.log_weight)
    return largest, jnp.maximum(jnp.sum(jnp.exp(weights.log_weight - largest) * weights.size), 1e-8)


def _weight(weights: SampleWeights, norm: tuple[jax.Array, jax.Array] | None) -> jax.Array:
    """W_b / sum_b W_b size_b: [b]."""
    assert norm is not None
    largest, size = norm
    return jnp.exp(weights.log_weight - largest) / size


@jax.named_scope("policy")
def prepare(agent: "Agent", batch: Batch, rng: jax.Array) -> Prepared:
    """Prepares an update. Nothing of it depends on rewards.

    Only the current observation is augmented: the next observation is part of a target, which is better without noise.
    """
    augment_rng, draw_rng, subset_rng = jax.random.split(rng, 3)
    policy, augment, level = agent.policy(), agent.algorithm.augment_images, agent.algorithm.augmentation_level
    batch = dataclasses.replace(
        batch,
        observations=policy.preprocess(augment_rng, batch.observations, train=augment, level=level),
        next_observations=policy.preprocess(None, batch.next_observations, train=False),
    )
    return Prepared(batch, draw(draw_rng, batch, agent.algorithm.acrlpd), subset_rng)


def compute_loss(agent: "Agent", batch: Batch, rng: jax.Array) -> tuple[jax.Array, Info]:
    """The loss that `update` would report for the same key; nothing is updated."""
    prepared = prepare(agent, batch, rng)
    joint = JointLoss(agent, prepared.subset_rng, trains_policy=True)
    targets = joint.targets(Params(), prepared.inputs)
    loss, (record, weights, norm) = loss_in_one_piece(joint, Params(), prepared.inputs, targets)
    alpha = agent.networks().temperature()
    info = loss_info(agent.algorithm, prepared.batch, record, weights, norm, targets, alpha)
    return loss, info | {"total_loss": loss}


def update(agent: "Agent", prepared: Prepared, *, update_policy: bool = True) -> tuple["Agent", Info]:
    """One update of policy, critics, temperature, targets and moving average. Pure.

    Without `update_policy` (critic warm-up) only critics, networks that judge, and temperature learn, and the policy's
    backward pass is not computed. It is not computed for a policy with nothing to train either; then the improvement's
    own networks learn. Where the config gives the TD loss no weight, the critics and their targets are not computed.
    With k critic updates per policy update, every k-th update updates policy and critics, and the others update the
    critics alone. Which updates these are follows from the agent's step, so a resumed run goes on in the same way.
    """
    every = agent.algorithm.acrlpd.critic_updates_per_policy_update
    if every == 1 or not update_policy:
        return _update(agent, prepared, update_policy=update_policy)
    of_both = jax.jit(functools.partial(_update, update_policy=True))  # so that it is traced once
    names = jax.eval_shape(of_both, agent, prepared)[1]

    def of_critics(agent: "Agent", prepared: Prepared) -> tuple["Agent", Info]:
        agent, info = _update(agent, prepared, update_policy=False)
        judges = agent.algorithm.improvement.judges
        of_policy = {"policy_grad_norm"} if judges else {"policy_grad_norm", "improvement_grad_norm"}
        if agent.algorithm.has_improvement and agent.improvement.learns:
            of_policy |= {"alpha_value"}  # that of the improvement, if it has one
        known = {name: value for name, value in info.items() if name not in of_policy}
        return agent, {name: known.get(name, jnp.asarray(NOT_COMPUTED, jnp.float32)) for name in names}

    return jax.lax.cond(agent.step % every == every - 1, of_both, of_critics, agent, prepared)


def _update(agent: "Agent", prepared: Prepared, *, update_policy: bool) -> tuple["Agent", Info]:
    algorithm = agent.algorithm
    improves = update_policy and algorithm.has_improvement and agent.improvement.learns
    judges = algorithm.has_improvement and algorithm.improvement.judges
    update_policy = update_policy and bool(jax.tree.leaves(agent.policy_params))
    params = Params(
        policy=agent.policy_params if update_policy else None,
        critic=agent.critics.online if algorithm.has_critic else None,
        temperature=agent.temperature_params if algorithm.acrlpd.learnable_temperature else None,
        improvement=agent.improvement.params if improves or judges else None,
        backup=agent.backup.params if algorithm.has_critic and agent.backup.learns else None,
    )
    joint = JointLoss(agent, prepared.subset_rng, trains_policy=update_policy or improves)
    loss, (record, weights, norm), targets, grads = compute_gradients(
        joint, params, prepared.inputs, agent.gradient_accumulation_steps
    )
    info = loss_info(algorithm, prepared.batch, record, weights, norm, targets, agent.networks().temperature())
    agent, applied = apply_gradients(agent, params, grads)
    return agent, info | applied | {"total_loss": loss}


@jax.named_scope("optimizer")
def apply_gradients(agent: "Agent", params: Params, grads: Params) -> tuple["Agent", Info]:
    """Steps every optimizer that has a gradient, targets and average; nothing moves if a gradient is not finite."""
    parts = {
        "policy": (agent.policy_optimizer, agent.policy_opt_state),
        "critic": (agent.critic_optimizer, agent.critic_opt_state),
        "temperature": (agent.temperature_optimizer, agent.temperature_opt_state),
        "improvement": (agent.critic_optimizer, agent.improvement.opt_state),
        "backup": (agent.critic_optimizer, agent.backup.opt_state),
    }
    norms = {name: global_norm(getattr(grads, name)) for name in parts}
    finite = jnp.isfinite(sum(norms.values()))
    changed: dict[str, Any] = {}
    for name, (optimizer, opt_state) in parts.items():
        learned = getattr(params, name)
        if learned is None:
            continue
        new, new_state = optimizer.step(getattr(grads, name), opt_state, learned, enabled=finite)
        if name in ("improvement", "backup"):
            changed[name] = getattr(agent, name).replace(params=new, opt_state=new_state)
        else:
            changed |= {f"{name}_params": new, f"{name}_opt_state": new_state}
    critics = agent.critics
    if params.critic is not None:
        tau = jnp.where(finite, agent.algorithm.acrlpd.target_update_tau, 0.0)
        critics = critics.replace(online=changed.pop("critic_params")).soft_update_target_networks(tau)
        critics = critics.update_average(agent.algorithm.acrlpd.critic_ema_decay, enabled=finite)
    new_agent = agent.replace(
        step=agent.step + 1,
        skipped_updates=agent.skipped_updates + (1 - finite.astype(jnp.int32)),
        critics=critics,
        **changed,
    )
    if params.policy is not None:
        new_agent = new_agent.update_ema_parameters(enabled=finite)
    return new_agent, update_info(agent, new_agent, norms, finite)
