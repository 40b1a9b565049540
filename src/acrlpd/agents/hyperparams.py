"""The algorithm as plain data: losses, best-of-N, temperature, chunks.

Symbols as in docs/algorithm.md: H = horizon_length, N = num_action_samples, K = sampling_steps, E = num_critics,
T = the policy's action_horizon.
"""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Literal

import jax
from annotated_types import Ge, Gt, Interval

from acrlpd.findings import Finding, error, warning

NonNegative = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]

_WITHOUT = "acrlpd.loss_weights.critic_weight 0 trains no critic"


# The agent carries the weights as arrays, so that a schedule can move them without a new compile.
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossWeights:
    """How the four losses add up to the total."""

    # Weight of the TD loss. Critics have an optimizer of their own, so this mostly shifts the reported total.
    # 0: no critics are trained, and training is cloning.
    critic_weight: NonNegative = 1.0
    # Weight of the policy improvement. 0: the policy is only cloned.
    actor_weight: NonNegative = 1.0
    # Weight of behaviour cloning. Higher: closer to the data, safer, less improvement.
    bc_weight: NonNegative = 0.01
    # Weight of the loss of a learned temperature.
    alpha_weight: NonNegative = 1.0


@dataclasses.dataclass(frozen=True)
class BestOfNConfig:
    """How N candidates are computed and one is chosen. The strategy never changes the result."""

    # "parallel" is fastest, "sequential" smallest, "chunked" between; "auto" decides from a memory estimate.
    strategy: Literal["auto", "parallel", "chunked", "sequential"] = "auto"
    # Candidates computed at a time by "chunked".
    chunk_size: Annotated[int, Ge(1)] = 32
    # Memory that "auto" may spend on candidates, in MiB per device.
    memory_limit_mib: int = 4_096
    # In online rounds, choose among the k best; 1: always the best. Larger: more exploration.
    top_k: Annotated[int, Ge(1)] = 1
    # Softmax temperature over the k best; None: the learned temperature alpha. Higher: more uniform.
    selection_temperature: Annotated[float | None, Gt(0)] = None
    # Bonus on a candidate's value per unit of mean distance to the other candidates; 0 disables.
    diversity_weight: NonNegative = 0.0


@dataclasses.dataclass(frozen=True)
class ACRLPDHyperparams:
    """Losses, sampling, targets and temperature."""

    loss_weights: LossWeights = dataclasses.field(default_factory=LossWeights)

    # Candidates per observation (N) for targets, advantages and acting. More: greedier and slower.
    num_action_samples: Annotated[int, Ge(1)] = 4
    # Euler steps of the flow (K) when candidates are sampled. Fewer: faster, coarser actions.
    sampling_steps: Annotated[int, Ge(1)] = 10
    best_of_n: BestOfNConfig = dataclasses.field(default_factory=BestOfNConfig)
    # Lowest and highest action of the robot, in the robot's units: candidates are clipped to these bounds before the
    # critics or the robot get them. Actions must not be normalised (data.normalize). None: candidates are not clipped.
    action_bounds: tuple[float, float] | None = None
    # Flow times of the policy's training: openpi's Beta(1.5, 1), which prefers noise, or all times equally often.
    flow_times: Literal["beta", "uniform"] = "beta"

    # Weight of a reward one environment step later. Higher: longer foresight, slower value learning.
    discount: Annotated[float, Interval(gt=0, le=1)] = 0.99
    # Share of the online critics that enters the target critics at each update.
    target_update_tau: Annotated[float, Interval(gt=0, le=1)] = 0.005
    # Error measure of the TD loss; "huber" limits the pull of outliers.
    critic_loss: Literal["mse", "huber"] = "mse"
    # Error beyond which "huber" becomes linear.
    huber_delta: Positive = 1.0
    # Whether the TD loss also trains the policy through the shared features.
    critic_gradient_to_policy: bool = False
    # First updates in which only critics and temperature learn, so that advantages mean something.
    critic_warmup_steps: Annotated[int, Ge(0)] = 0
    # The critics learn in every update, policy and improvement in every k-th one. Higher: better critics for the same
    # time of the policy, whose learning-rate schedule then counts its own updates (EXPO: 20).
    critic_updates_per_policy_update: Annotated[int, Ge(1)] = 1

    # What the policy is cloned from; critics learn from everything. "all": every window. "success": windows that lead
    # to a success; qchunking.success_ratio draws more of them. "advantage": of each task's windows in a batch, those
    # whose advantage is above the quantile `advantage_quantile`; 0.7 clones the best 30 %.
    policy_data: Literal["all", "success", "advantage"] = "all"
    advantage_quantile: Annotated[float, Interval(ge=0, lt=1)] = 0.7

    # Weigh cloning by each sample's importance min(exp(advantage / temperature), clip), as AWR weighs its own loss.
    bc_importance_weighting: bool = False
    bc_importance_clip: Positive = 100.0
    # Weigh cloning by each sample's own loss, so that hard samples count more.
    bc_difficulty_weighting: bool = False

    # Temperature alpha of selection among the k best candidates, of bc_importance_weighting and, where its own settings
    # say so, of AWR. In units of the critics' values: its first value, and its only value if alpha is not learned.
    initial_temperature: Positive = 1.0
    # Learn alpha, so that a choice among the candidates with probabilities softmax(Q / alpha) has the target entropy.
    learnable_temperature: bool = False
    # Entropy of that choice as a share of the largest, log N. Higher: larger alpha, more even choices and weights.
    target_choice_entropy: Annotated[float, Interval(gt=0, lt=1)] = 0.5
    # Target entropy of one step of a policy that knows its probabilities (sac) = -multiplier * real action_dim.
    target_entropy_multiplier: float = 0.5
    # That target entropy itself; None: from the multiplier.
    target_entropy: float | None = None

    # Decay of the policy's moving average, which is what is evaluated and exported; None: no average.
    # Closer to 1: smoother, lags more.
    ema_decay: Annotated[float | None, Interval(ge=0, lt=1)] = 0.999
    # Decay of a moving average of the critics, which then chooses among candidates wherever the policy acts and is
    # exported; learning never reads this average. None: the online critics choose. Closer to 1: choices change more
    # slowly; 0.99 is a usual value.
    critic_ema_decay: Annotated[float | None, Interval(ge=0, lt=1)] = None

    @property
    def rewards_reach_policy(self) -> bool:
        """False if the policy only clones every window, so that runs with other rewards have the same policy."""
        is_chosen = self.policy_data != "all" or self.bc_importance_weighting
        return self.loss_weights.actor_weight != 0 or is_chosen or self.critic_gradient_to_policy

    def check(self, *, improvement_judges: bool = False) -> Iterator[Finding]:
        """Errors and warnings about fields that do not fit each other, and the improvement (`Improvement.judges`)."""
        samples, weights = self.num_action_samples, self.loss_weights
        if samples == 1 and self.learnable_temperature:
            yield error(
                "a learned temperature needs the values of at least 2 candidates: raise acrlpd.num_action_samples, or "
                "set acrlpd.learnable_temperature false"
            )
        if self.action_bounds is not None and not self.action_bounds[0] < self.action_bounds[1]:
            yield error(f"acrlpd.action_bounds must be the lowest and the highest action; found {self.action_bounds}")
        if samples > 64:
            yield warning(
                f"num_action_samples {samples} costs more than the rest of the step; 4 to 32 is usual. "
                "`acrlpd plan` shows what it costs"
            )
        if weights.actor_weight == 0 and weights.bc_weight == 0:
            yield warning("actor_weight and bc_weight are both 0: the policy does not train, only the critics do")
        if weights.critic_weight == 0:
            judges = improvement_judges and weights.actor_weight > 0
            yield from self._check_without_critics() if judges else self._check_cloning()

    def _check_cloning(self) -> Iterator[Finding]:
        """Where nothing judges, settings that need a judge are errors."""
        yield from self._check_without_critics()
        if self.loss_weights.actor_weight > 0:
            yield error(f"{_WITHOUT}, which a policy improvement needs: set acrlpd.loss_weights.actor_weight 0")
        if self.critic_updates_per_policy_update > 1:
            yield error(f"{_WITHOUT}: every update is the policy's, so set acrlpd.critic_updates_per_policy_update 1")
        if self.critic_warmup_steps > 0:
            yield error(f"{_WITHOUT}, so there is nothing to warm up: set acrlpd.critic_warmup_steps 0")

    def _check_without_critics(self) -> Iterator[Finding]:
        """Without critics there are no values of chunks, so settings that need such values are errors."""
        if self.bc_importance_weighting:
            yield error(f"{_WITHOUT}, which bc_importance_weighting needs: turn bc_importance_weighting off")
        if self.policy_data == "advantage":
            yield error(f"{_WITHOUT}, which acrlpd.policy_data advantage needs: set acrlpd.policy_data all or success")
        if self.critic_ema_decay is not None:
            yield error(f"{_WITHOUT}, so there is nothing to average: set acrlpd.critic_ema_decay none")
        if self.learnable_temperature:
            yield error(f"{_WITHOUT}, but alpha learns only beside critics: set acrlpd.learnable_temperature false")


@dataclasses.dataclass(frozen=True)
class QChunkingConfig:
    """The chunks that the critics judge."""

    # Steps per chunk (H): actions per value, steps per bootstrap. At most the policy's action_horizon, unless
    # critic_action_horizon is smaller.
    # Longer: faster value propagation, harder to fit, slower reaction.
    horizon_length: Annotated[int, Ge(1)] = 20
    # Real action dims of the robot; the policy pads to its own action_dim (32).
    action_dim: Annotated[int, Ge(1)] = 14
    # Share of each batch whose window lies wholly inside its episode. Lower: more episode ends. None: every step of the
    # data is equally likely to begin a window.
    sequence_ratio: Annotated[float | None, Interval(ge=0, le=1)] = 0.7
    # Share of each batch that is drawn from the windows that lead to a success; the rest is drawn from all windows. The
    # critics' loss weighs windows so that the critics learn from the data as it comes. None: no window is preferred.
    success_ratio: Annotated[float | None, Interval(gt=0, lt=1)] = None
    # Actions the critic sees; None: all H. 1 gives n-step returns without chunks (n = H).
    critic_action_horizon: Annotated[int | None, Ge(1)] = None

    @property
    def chunk_length(self) -> int:
        """Actions of a chunk that the critics see; C in docs/algorithm.md."""
        return self.critic_action_horizon or self.horizon_length

    def check(self, *, policy_action_horizon: int, policy_action_dim: int) -> Iterator[Finding]:
        """Errors about settings that do not fit a policy that predicts chunks of this size."""
        if self.chunk_length > policy_action_horizon:
            yield error(
                f"the critics see {self.chunk_length} actions, more than the policy's "
                f"action_horizon {policy_action_horizon}; lower qchunking.horizon_length (or, for n-step returns, "
                "qchunking.critic_action_horizon), or raise model.action_horizon"
            )
        if self.critic_action_horizon is not None and self.critic_action_horizon > self.horizon_length:
            yield error(
                f"qchunking.critic_action_horizon {self.critic_action_horizon} exceeds horizon_length "
                f"{self.horizon_length}"
            )
        if self.action_dim > policy_action_dim:
            yield error(
                f"qchunking.action_dim {self.action_dim} (the robot's) must lie between 1 and model.action_dim "
                f"{policy_action_dim} (what the policy pads to)"
            )
