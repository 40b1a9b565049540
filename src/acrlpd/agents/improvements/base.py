"""What a policy improvement is: how the critics' values make the policy better than its data.

An improvement is one file: a frozen dataclass whose fields are its options, and whose methods say what it does in an
update. `docs/extending.md` writes one from scratch.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

from acrlpd.agents.critics.base import CriticConfig, standardize
from acrlpd.agents.hyperparams import ACRLPDHyperparams
from acrlpd.agents.networks import Draws, Networks
from acrlpd.agents.temperature import effective_share
from acrlpd.batch import Batch
from acrlpd.choice import Choice, kind_name
from acrlpd.findings import Finding, error
from acrlpd.models.families.base import PolicyConfig
from acrlpd.models.observation import Observation
from acrlpd.models.policy import Context, FlowPolicy

if TYPE_CHECKING:
    from acrlpd.agents.algorithm import Algorithm

Info = dict[str, jax.Array]


class Candidates(NamedTuple):
    """N action chunks for each observation, and their values under the online critics."""

    actions: jax.Array  # [b, N, T, a]
    values: jax.Array  # [b, N]


class View:
    """What an improvement sees of an update, all of it at the current observation s.

    Expensive results are computed when they are first asked for, and only once: an improvement that does not look at
    candidates does not pay for them. Candidates, advantages and the temperature carry no gradient.
    """

    def __init__(self, algorithm: "Algorithm", networks: Networks, batch: Batch, draws: Draws):
        self.algorithm = algorithm
        self.networks = networks  # what learns
        self.batch = batch
        self.draws = draws  # every random number of the update

    @functools.cached_property
    def context(self) -> Context:
        """The policy's context of s, with gradient."""
        with jax.named_scope("policy"):
            return self.networks.encode(self.batch.observations)

    @functools.cached_property
    def fixed(self) -> Networks:
        """The networks without gradient."""
        return self.networks.without_gradient()

    @functools.cached_property
    def fixed_context(self) -> Context:
        return jax.lax.stop_gradient(self.context)

    @functools.cached_property
    def flow_losses(self) -> jax.Array:
        """The policy's flow-matching losses m [b, T] on the logged actions, with gradient."""
        actions, noise, time = jnp.asarray(self.batch.actions), self.draws.flow_noise, self.draws.flow_time
        return self.networks.policy.flow_matching_loss(self.context, actions, noise, time)

    @functools.cached_property
    def candidates(self) -> Candidates:
        """N candidates of the policy at s."""
        return Candidates(self.sampled, self.values(self.sampled))

    @functools.cached_property
    def advantage(self) -> jax.Array:
        """A [b]: how much better the critics find the logged chunk than what the backup compares with.

        The advantage is 0 where the critics may not judge the logged chunk.
        """
        return self.algorithm.backup.advantage(self) * self.batch.sequence_mask

    @functools.cached_property
    def sampled(self) -> jax.Array:
        """The actions of N candidates of the policy at s: [b, N, T, a]."""
        noise = self.draws.candidate_noise
        return self.algorithm.candidates(self.fixed, self.fixed_context, self.batch.observations, noise)

    @property
    def temperature(self) -> jax.Array:
        """alpha, without gradient."""
        return self.fixed.temperature()

    def values(self, actions: jax.Array) -> jax.Array:
        """Values [b, n] of actions [b, n, T, a] under the online critics; a gradient reaches the actions alone."""
        return self.algorithm.values(self.fixed, self.fixed_context, self.batch.observations, actions)


@flax.struct.dataclass
class SampleWeights:
    """How much each sample counts; without gradient.

    The loss of a batch is sum_b W_b loss_b / sum_b W_b size_b with W = exp(log_weight).
    """

    log_weight: jax.Array  # [b]; -inf where a sample does not count
    size: jax.Array  # [b]: how many terms a sample's loss sums up, for example its valid steps
    kept: dict[str, jax.Array]  # name -> [b, ...]: results that `losses` and `metrics` need

    def only(self, chosen: jax.Array) -> "SampleWeights":
        """The same weights, but samples that are not `chosen` (bool [b]) do not count."""
        return dataclasses.replace(self, log_weight=jnp.where(chosen, self.log_weight, -jnp.inf))


def equal_weights(batch: Batch, **kept: jax.Array) -> SampleWeights:
    """Every sample counts the same, and its loss is one number."""
    ones = jnp.ones(batch.actions.shape[0], jnp.float32)
    return SampleWeights(log_weight=jnp.zeros_like(ones), size=ones, kept=kept)


class Improvement(Choice, abc.ABC):
    """One way to improve the policy. Used where `acrlpd.loss_weights.actor_weight` is above 0.

    An update asks twice. `weigh` comes first and says how much each sample counts; nothing of it is differentiated.
    `losses` is differentiated. With micro-batches, `weigh` sees one micro-batch at a time. All samples of the batch are
    weighed, and `balance` sees the weights of all of them, before the first loss. So what `losses` needs of the
    candidates is handed on in `SampleWeights.kept` instead of being computed again.
    """

    package = "acrlpd.agents.improvements"

    # Whether `losses` clones the logged actions, so that `acrlpd.policy_data` chooses its windows as well.
    clones_logged_actions: ClassVar[bool] = False
    # Whether the lowest possible loss is 0, so that a growing loss is reported as trouble.
    zero_at_best: ClassVar[bool] = True
    # Whether the policy keeps its initial weights, so that only critics and the improvement's own networks learn. Such
    # a policy has neither gradients nor optimizer state, and its weights are bfloat16.
    freezes_policy: ClassVar[bool] = False
    # Whether the policy learns from prompts that say how good the logged actions are. Batches then have the labelled
    # prompts and the returns of their windows, and the improvement takes the place of plain cloning.
    labels_prompts: ClassVar[bool] = False
    # Whether networks of the improvement's own judge windows. They learn from `judge` in every update, the updates of
    # critics alone included, and critics may be left out.
    judges: ClassVar[bool] = False

    def weigh(self, view: View) -> SampleWeights:
        """How much each sample of the batch counts."""
        return equal_weights(view.batch)

    def balance(self, weights: SampleWeights) -> SampleWeights:
        """The weights, once `weigh` has seen the whole batch: for weights that depend on other samples."""
        return weights

    @abc.abstractmethod
    def losses(self, view: View, weights: SampleWeights) -> jax.Array:
        """The loss of each sample, [b]."""

    def metrics(self, weights: SampleWeights) -> Info:
        """Scalars about the whole batch to report beside the loss."""
        return {}

    def judge(self, view: View) -> jax.Array | None:
        """The loss of each sample for networks that judge windows, [b]; None: the improvement has no such networks."""
        return None

    def create_networks(
        self, policy: FlowPolicy, algorithm: "Algorithm", critic: CriticConfig, rngs: nnx.Rngs
    ) -> nnx.Module | None:
        """The improvement's own networks, which learn from `losses` and `judge` alone; `critic` says what critics read.

        A view has them as `networks.improvement`. They are trained with the critics' optimizer and learning rate, and
        saved and exported with the critics.
        """
        return None

    def acting_context(self, policy: FlowPolicy, context: Context, observation: Observation) -> Context:
        """What candidates are denoised from, for targets and for acting; `context` is that of the observation as it is.

        Acting without critics asks for this, too, so it needs no network of the improvement's own.
        """
        return context

    def propose(
        self,
        networks: Networks,
        context: Context,
        observation: Observation,
        noise: jax.Array,
        denoise: Callable[[jax.Array], jax.Array],
    ) -> jax.Array:
        """Candidates [b, N, T, a] from noise [b, N, T, a], for targets, for `weigh` and for acting.

        `denoise` turns noise into chunks as the policy does, within the robot's bounds if the config names bounds. An
        improvement that steers the noise or edits the chunks overrides this method.
        """
        return denoise(noise)

    def judged_noise(
        self, networks: Networks, context: Context, observation: Observation, noise: jax.Array
    ) -> jax.Array:
        """What critics judge in place of the candidates that `propose` makes of the same noise: [b, N, noise_dim].

        An improvement that overrides this method has critics of noise. Played chunks are then recorded with the noise
        that was judged, and a batch has this noise beside the actions. The dataset has none, so critics learn from the
        replay alone.
        """
        raise NotImplementedError(f"the critics of {type(self).__name__} judge chunks, not noise")

    def noise_dim(self, model: PolicyConfig) -> int:
        """Numbers in the noise of one chunk that critics judge; asked for where `judges_noise`."""
        raise NotImplementedError(f"{type(self).__name__}.noise_dim must say how many numbers the critics judge")

    @property
    def judges_noise(self) -> bool:
        """Whether this improvement overrides `judged_noise`, so that critics judge noise in place of chunks."""
        return type(self).judged_noise is not Improvement.judged_noise

    @property
    def makes_candidates(self) -> bool:
        """Whether this improvement overrides `propose`, so that the policy alone would act differently."""
        return type(self).propose is not Improvement.propose

    def check(
        self, hyperparams: ACRLPDHyperparams, *, model: PolicyConfig, critic: CriticConfig, frozen_backbone: bool
    ) -> Iterator[Finding]:
        """Errors and warnings about this improvement in a run with these other sections."""
        return iter(())


# -- for improvements with networks of their own -----------------------------------------------------------


def read_observation(context: Context, observation: Observation, feature_dim: int) -> jax.Array:
    """What such a network reads of an observation: the mean of the policy's features, if any, and the state: [b, d]."""
    state = jnp.asarray(observation.state)
    if not feature_dim:
        return state
    assert context.features is not None
    return jnp.concatenate([standardize(context.features.mean()), state], axis=-1)


def check_features(improvement: Improvement, model: PolicyConfig, critic: CriticConfig) -> Iterator[Finding]:
    """An error where the features that `read_observation` wants are not computed."""
    if model.feature_dim and not critic.use_pi0_features:
        yield error(
            f"improvement {kind_name(improvement)} reads the features of the {kind_name(model)} policy. Features are "
            "computed only for critics that read them too: set critic.use_pi0_features true"
        )


def check_smooth(improvement: Improvement, model: PolicyConfig, why: str) -> Iterator[Finding]:
    """An error where the policy draws tokens, so that chunks are no smooth function of noise."""
    if model.samples_tokens:
        yield error(
            f"improvement {kind_name(improvement)} {why}, but the {kind_name(model)} policy draws tokens: choose "
            "improvement awr or expo, or set model pi0"
        )


def check_temperature(improvement: Improvement, hyperparams: ACRLPDHyperparams) -> Iterator[Finding]:
    """An error where the config learns a temperature beside that of the improvement."""
    if hyperparams.learnable_temperature:
        yield error(
            f"improvement {kind_name(improvement)} learns a temperature of its own, which takes the place of the "
            "temperature that the values of candidates steer: set acrlpd.learnable_temperature false"
        )


def check_entropy(
    improvement: Improvement, hyperparams: ACRLPDHyperparams, model: PolicyConfig, bound: float
) -> Iterator[Finding]:
    """An error where not even uniform numbers in [-bound, bound] have the target entropy: alpha would grow for ever."""
    highest, given = math.log(2 * bound), hyperparams.target_entropy
    target = -hyperparams.target_entropy_multiplier if given is None else given / model.action_dim
    if target >= highest:
        name = "target_entropy_multiplier" if given is None else "target_entropy"
        yield error(
            f"improvement {kind_name(improvement)} cannot reach its target entropy of {target:.3g} for each dim: "
            f"numbers between {-bound:g} and {bound:g} have at most {highest:.3g}; change acrlpd.{name}"
        )


# -- for improvements that weigh samples ---------------------------------------------------------------------


def weight_metrics(weights: SampleWeights) -> Info:
    """Metrics of weights that come from kept["advantage"]; its mean and spread are over the windows in kept["judged"].

    The other windows have no advantage, and the 0 in its place is far from the mean where a backup has a V.
    """
    advantage, judged = weights.kept["advantage"], weights.kept["judged"]
    number = jnp.maximum(jnp.sum(judged), 1.0)
    mean = jnp.sum(advantage * judged) / number
    raw = jnp.exp(weights.log_weight)
    return {
        "advantage_mean": mean,
        "advantage_std": jnp.sqrt(jnp.sum(jnp.square(advantage - mean) * judged) / number),
        "awr_weight_mean": jnp.mean(raw),
        "awr_weight_max": jnp.max(raw),
        "awr_effective_ratio": effective_share(weights.log_weight),
    }
