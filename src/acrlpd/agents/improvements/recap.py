"""RECAP: the policy learns from all windows, with a label in the prompt that says which of them were good."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from annotated_types import Ge, Interval, MinLen
from flax import nnx

from acrlpd.agents.critics.base import CriticConfig, ObservationReader
from acrlpd.agents.hyperparams import ACRLPDHyperparams, NonNegative
from acrlpd.agents.improvements.base import Improvement, Info, SampleWeights, View, check_smooth
from acrlpd.agents.policy_data import exceeds_quantile
from acrlpd.agents.value_network import ValueNetwork
from acrlpd.batch import Returns
from acrlpd.choice import kind_name
from acrlpd.findings import Finding, error
from acrlpd.models.families.base import PolicyConfig
from acrlpd.models.observation import NEGATIVE, NO_LABEL, POSITIVE, Observation
from acrlpd.models.policy import Context, FlowPolicy

if TYPE_CHECKING:
    from acrlpd.agents.algorithm import Algorithm

# The bins of the distributional value lie evenly in [-1, 0], where all returns lie.
_BINS = np.linspace(-1.0, 0.0, 201, dtype=np.float32)


@dataclasses.dataclass(frozen=True)
class RECAP(Improvement):
    """Cloning with "Advantage: positive" or "Advantage: negative" in the prompt; the policy acts with the positive one.

    V(s) is a distribution over 201 returns. It learns from Monte Carlo returns, so it is the value of the data and not
    of the policy, and it needs no target network. The advantage of a window is

        A = -(steps of the window, up to a success) / (steps of the task's longest episode) + V(s') - V(s)

    where V(s') is 0 if the window has the success, and -1 if the episode ends within the window without success. Of
    each task's windows in a batch, the share `positive_share` with the highest advantages is labelled positive. A
    window whose actions are all those of a human who took over from the policy is always positive. Labels are dropped
    at random, so that the policy knows the plain prompt, too, and guidance can lead away from it.

    What differs from the paper: labels follow V as V learns, where the paper labels a dataset once, with a V that has
    been trained; the quantile is that of a batch; a window that is a human's only in part is labelled by its advantage,
    where the paper gives the positive label to every step of a correction; V is a perceptron that reads what the
    critics read, where the paper has a vision-language model.
    """

    # Share of the windows of each task that is labelled positive. The paper has 0.3 for demonstrations, 0.4 where the
    # policy's own episodes are among the data, and 0.1 for tasks whose episodes all succeed.
    positive_share: Annotated[float, Interval(gt=0, lt=1)] = 0.4
    # Share of the prompts that lose their label.
    label_dropout: Annotated[float, Interval(ge=0, lt=1)] = 0.3
    # beta of v = v_plain + beta (v_positive - v_plain) when the policy acts. 1 needs one forward pass, and is the
    # paper's default; 1.5 to 2.5 pushes actions further towards what was good, and to the edge of the data.
    guidance: NonNegative = 1.0
    # Hidden layers of V.
    hidden_dims: Annotated[tuple[int, ...], MinLen(1), Ge(1)] = (512, 512, 512)

    labels_prompts: ClassVar[bool] = True
    judges: ClassVar[bool] = True

    def create_networks(
        self, policy: FlowPolicy, algorithm: "Algorithm", critic: CriticConfig, rngs: nnx.Rngs
    ) -> ValueNetwork:
        reader = ObservationReader(critic, feature_dim=policy.feature_dim, image_keys=policy.image_keys, rngs=rngs)
        return ValueNetwork(self.hidden_dims, reader, policy.state_dim, len(_BINS), rngs)

    def judge(self, view: View) -> jax.Array:
        """The cross-entropy of V's distribution with the bin of the return, for windows that are part of the task."""
        returns, network = _returns(view), view.networks.own(ValueNetwork)
        logits = network(view.fixed_context.features, view.batch.observations)
        nearest = jnp.round((jnp.asarray(returns.return_to_go) + 1) * (len(_BINS) - 1)).astype(jnp.int32)
        loss = optax.losses.softmax_cross_entropy_with_integer_labels(logits, nearest)
        return loss * returns.counts * view.batch.importance

    def weigh(self, view: View) -> SampleWeights:
        returns, network, batch = _returns(view), view.fixed.own(ValueNetwork), view.batch
        value = _expectation(network(view.fixed_context.features, batch.observations))
        next_features = view.fixed.encode(batch.next_observations).features
        next_value = _expectation(network(next_features, batch.next_observations))
        steps = jnp.sum(batch.valid, axis=1)
        return SampleWeights(
            log_weight=jnp.zeros_like(steps),
            size=steps,
            kept={
                "advantage": jnp.asarray(returns.rewards - returns.fails) + returns.continues * next_value - value,
                "error": jnp.abs(value - returns.return_to_go),
                "value": value,
                "task": jnp.asarray(batch.task_id),
                "counts": jnp.asarray(returns.counts) > 0,
                "human": jnp.asarray(returns.human) > 0,
                "dropped": view.draws.label_noise < self.label_dropout,
            },
        )

    def balance(self, weights: SampleWeights) -> SampleWeights:
        kept = weights.kept
        is_better = exceeds_quantile(kept["advantage"], kept["task"], kept["counts"], 1 - self.positive_share)
        judged = jnp.where(is_better | kept["human"], POSITIVE, NEGATIVE)
        label = jnp.where(kept["dropped"] | ~kept["counts"], NO_LABEL, judged)
        return dataclasses.replace(weights, kept={**kept, "judged": judged, "label": label})

    def losses(self, view: View, weights: SampleWeights) -> jax.Array:
        """The flow-matching loss of the logged actions, given the prompt with its label."""
        policy, batch, draws = view.networks.policy, view.batch, view.draws
        context = policy.encode(batch.observations.with_label(weights.kept["label"]), features=False)
        losses = policy.flow_matching_loss(context, jnp.asarray(batch.actions), draws.flow_noise, draws.flow_time)
        return jnp.sum(losses * batch.valid, axis=1)

    def metrics(self, weights: SampleWeights) -> Info:
        kept = weights.kept
        number = jnp.maximum(jnp.sum(kept["counts"]), 1)

        def mean(x: jax.Array) -> jax.Array:
            return jnp.sum(x * kept["counts"]) / number

        return {
            "value_mean": mean(kept["value"]),
            "value_error": mean(kept["error"]),
            "advantage_mean": mean(kept["advantage"]),
            "advantage_std": jnp.sqrt(mean(jnp.square(kept["advantage"] - mean(kept["advantage"])))),
            "positive_share": mean(kept["judged"] == POSITIVE),
            "correction_share": mean(kept["human"]),
        }

    def acting_context(self, policy: FlowPolicy, context: Context, observation: Observation) -> Context:
        label = jnp.full(observation.state.shape[0], POSITIVE)
        positive = policy.encode(observation.with_label(label), features=False)
        if self.guidance == 1.0:
            return positive
        return dataclasses.replace(positive, other=context, guidance=self.guidance)

    def check(
        self, hyperparams: ACRLPDHyperparams, *, model: PolicyConfig, critic: CriticConfig, frozen_backbone: bool
    ) -> Iterator[Finding]:
        if not model.prompt_len:
            yield error(
                f"improvement recap writes labels into the prompt, and the {kind_name(model)} policy reads no prompt: "
                "set model pi0, or choose another improvement"
            )
        yield from check_smooth(self, model, "guides the flow with labels in the prompt")
        if hyperparams.loss_weights.bc_weight > 0:
            yield error(
                "improvement recap clones with labels in place of plain cloning: set acrlpd.loss_weights.bc_weight 0; "
                f"found {hyperparams.loss_weights.bc_weight}"
            )
        if hyperparams.policy_data != "all":
            yield error(
                "improvement recap learns from good and bad windows and labels them: set acrlpd.policy_data all; "
                f"found {hyperparams.policy_data}"
            )


def _returns(view: View) -> Returns:
    returns = view.batch.returns
    if returns is None:
        raise ValueError("the batch has no returns of its windows; the data layer adds them where prompts have labels")
    return returns


def _expectation(logits: jax.Array) -> jax.Array:
    """V [b] of logits [b, bins]."""
    return jax.nn.softmax(logits) @ _BINS
