"""The ten ways in which a run goes wrong: how each is measured, and what to do about it.

Some measurements are compared with what is usual for the run, which `UsualValues` learns from the run's own lines.
The `excess` of an assessment says how far a measurement is past its threshold. Above 1 the line is bad, below one
half it is healthy. In between, an episode of trouble neither begins nor ends.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from acrlpd.config import RLTrainConfig
from acrlpd.runs.metrics_log import TIMING
from acrlpd.units import format_seconds

Line = Mapping[str, Any]
Severity = Literal["warning", "error"]
Component = Literal["policy", "critic", "temperature", "improvement", "backup"]

LOSS_EXPLOSION_FACTOR = 10.0
# A loss below this is not exploding, whatever it was before. For the critic's loss: times the largest reward squared.
_SMALL_LOSS = 1e-3
Q_COLLAPSE_STD = 0.01  # of the largest reward
Q_BOUND_SLACK = 0.05  # of the bound
BC_RL_RATIOS = (1e-3, 100.0)
TEMPERATURE_RANGE = (0.01, 100.0)  # of the spread of the candidates' values
DEAD_CANDIDATE_SPREAD = 1e-3  # of normalised actions
DATA_WAIT_SHARE = 0.25
SLOWDOWN_FACTOR = 2.0
# Advice about a learning rate mentions clipping if the gradient is this many times its clipping threshold. Clipping
# alone is no reason for advice: most gradients of critics are clipped, and Adam's steps do not depend on their size.
MUCH_CLIPPED = 10.0

# Lines after which a usual value is known.
_LINES_TO_LEARN = 5
# Share of a new line in the usual value. A line that is out of the ordinary counts less: trouble must not pass for
# normal at once, but a run that has changed for good is believed in the end.
_RATE, _SLOW_RATE = 0.1, 0.02
_OUT_OF_THE_ORDINARY = 3.0

LOSSES = ("critic_loss", "bc_loss", "actor_loss")
# The times of updates, and of those that leave the policy alone, as in the warm-up of the critics: they take less time.
UPDATE_TIME, CRITIC_UPDATE_TIME = "update_time", "critic_update_time"


@dataclasses.dataclass
class UsualValues:
    """Running estimates of one run; all of them survive JSON exactly."""

    phase: str | None = None
    num_lines: int = 0  # in this phase
    reward_min: float = 0.0
    reward_max: float = 0.0
    # Name -> logarithm of the usual value, and the number of lines that it comes from.
    log_usual: dict[str, tuple[float, int]] = dataclasses.field(default_factory=dict)

    def enter(self, line: Line) -> None:
        """Takes phase and rewards of a line that is about to be judged; a new phase forgets what was usual."""
        if line.get("phase") != self.phase:
            self.phase, self.num_lines, self.log_usual = line.get("phase"), 0, {}
        self.num_lines += 1
        self.reward_min = min(self.reward_min, line.get("reward_min") or 0.0)
        self.reward_max = max(self.reward_max, line.get("reward_max") or 0.0)

    def learn(self, line: Line) -> None:
        """Adds the losses and the update time of a line that has been judged."""
        values = {name: line.get(name) for name in LOSSES} | {kind_of_time(line): update_time(line)}
        for name, value in values.items():
            if value is None or value <= 0:
                continue
            log_value = math.log(value)
            mean, count = self.log_usual.get(name, (log_value, 0))
            if count < _LINES_TO_LEARN:
                rate = 1 / (count + 1)
            else:
                rate = _RATE if abs(log_value - mean) < math.log(_OUT_OF_THE_ORDINARY) else _SLOW_RATE
            self.log_usual[name] = (mean + rate * (log_value - mean), count + 1)

    def usual(self, name: str) -> float | None:
        """The usual value (a geometric mean); None before there were enough lines."""
        mean, count = self.log_usual.get(name, (0.0, 0))
        return math.exp(mean) if count >= _LINES_TO_LEARN else None

    @property
    def reward_scale(self) -> float:
        """Size of the largest reward so far; 1 where all rewards were 0."""
        return max(abs(self.reward_min), abs(self.reward_max)) or 1.0


def update_time(line: Line) -> float | None:
    """Seconds per update, with the wait for its data, without checkpoints and evaluations."""
    step, wait = line.get(f"{TIMING}step_s"), line.get(f"{TIMING}data_wait_s")
    return None if step is None or wait is None else step + wait


def kind_of_time(line: Line) -> str:
    """The usual value with which the time of a line's updates is compared."""
    return UPDATE_TIME if "actor_loss" in line else CRITIC_UPDATE_TIME


@dataclasses.dataclass(frozen=True)
class Assessment:
    """How bad one line is in one respect."""

    excess: float
    message: str
    # The component whose learning rate may be the cause.
    component: Component | None = None


# Returns None for a line that does not have the numbers.
Assess = Callable[[Line, UsualValues, RLTrainConfig], Assessment | None]


@dataclasses.dataclass(frozen=True)
class AnomalyKind:
    """One way to go wrong."""

    name: str
    severity: Severity
    assess: Assess
    advice: str
    patience: int  # bad lines in a row that begin an episode
    grace: int  # lines at the start of a phase that are not judged
    is_timed: bool  # whether measured times decide, so that two equal runs may differ

    @property
    def metric(self) -> str:
        """The metric that is 1 while the trouble lasts."""
        return f"{TIMING if self.is_timed else ''}anomaly/{self.name}"


KINDS: list[AnomalyKind] = []


def _kind(
    severity: Severity, advice: str, *, patience: int = 3, grace: int = 0, is_timed: bool = False
) -> Callable[[Assess], Assess]:
    """Makes a kind of a function that assesses a line; the kind has the function's name."""

    def register(assess: Assess) -> Assess:
        KINDS.append(AnomalyKind(assess.__name__, severity, assess, advice, patience, grace, is_timed))
        return assess

    return register


def _range_excess(value: float, bounds: tuple[float, float]) -> float:
    """How many times a positive number is above the upper bound or below the lower one."""
    low, high = bounds
    return max(value / high, low / max(value, 1e-12))


@_kind(
    "error",
    "Lower the learning rate of the part whose loss grows and clip its gradients harder. More behaviour cloning "
    "(bc_weight) steadies the policy; fewer candidates (num_action_samples) steady the targets. Look for outliers in "
    "the rewards: acrlpd.critic_loss huber limits their pull.",
    patience=2,
)
def loss_explosion(line: Line, values: UsualValues, rl_config: RLTrainConfig) -> Assessment | None:
    worst = None
    for name in LOSSES:
        if name == "actor_loss" and not rl_config.improvement.zero_at_best:
            continue  # minus a value: the size of such a loss says nothing
        if name == "bc_loss" and line.get("bc_weight") == 0:
            continue  # nothing lowers a loss without weight
        loss, usual = line.get(name), values.usual(name)
        if loss is None or usual is None:
            continue
        floor = _SMALL_LOSS * (values.reward_scale**2 if name == "critic_loss" else 1.0)
        excess = loss / (LOSS_EXPLOSION_FACTOR * max(usual, floor))
        if worst is None or excess > worst.excess:
            message = f"{name} is {loss:.4g}, {loss / usual:.3g} times its usual {usual:.4g}"
            worst = Assessment(excess, message, "critic" if name == "critic_loss" else "policy")
    return worst


@_kind(
    "warning",
    "Check that successes and rewards are labelled (`acrlpd data inspect`) and that some episodes fail and some "
    "succeed. If they do: less critic weight decay, a higher critic learning rate, or a longer chunk "
    "(qchunking.horizon_length), which carries rewards further per update.",
    grace=10,
)
def q_collapse(line: Line, values: UsualValues, rl_config: RLTrainConfig) -> Assessment | None:
    std = line.get("q_std")
    if std is None:
        return None
    scale = values.reward_scale
    rewards = f"rewards reach {scale:.4g}"
    if values.reward_min == values.reward_max == 0.0:
        rewards = "no reward other than 0 was seen"
    message = f"Q is {line.get('q_mean') or 0.0:.4g} everywhere (standard deviation {std:.3g}; {rewards})"
    return Assessment(Q_COLLAPSE_STD * scale / max(std, 1e-12), message)


@_kind(
    "error",
    "No policy can earn such a value: the targets contain the critics' own mistakes. Use critic.q_aggregation min with "
    "more critics, keep critic.use_layer_norm on, lower acrlpd.target_update_tau, the critic learning rate or "
    "num_action_samples. Check that true terminals are marked, so that targets end there.",
    patience=2,
)
def q_divergence(line: Line, values: UsualValues, rl_config: RLTrainConfig) -> Assessment | None:
    discount = rl_config.acrlpd.discount
    found = {name: line[name] for name in ("q_mean", "target_q_mean") if line.get(name) is not None}
    if discount >= 1 or not found:
        return None
    low, high = values.reward_min / (1 - discount), values.reward_max / (1 - discount)
    slack = Q_BOUND_SLACK * values.reward_scale / (1 - discount)
    outside = {name: max(value - high, low - value) for name, value in found.items()}
    worst = max(outside, key=lambda name: outside[name])
    message = (
        f"{worst} is {found[worst]:.4g}; rewards from {values.reward_min:.4g} to {values.reward_max:.4g} and "
        f"discount {discount:g} allow {low:.4g} to {high:.4g}"
    )
    return Assessment(outside[worst] / slack, message, "critic")


@_kind(
    "warning",
    "One of the two losses decides alone. Too much cloning: lower bc_weight, and the policy may improve on the data. "
    "Too little cloning: raise bc_weight, or the policy forgets the data.",
)
def bc_rl_imbalance(line: Line, values: UsualValues, rl_config: RLTrainConfig) -> Assessment | None:
    bc_weight = line.get("bc_weight")
    bc, actor = line.get("bc_loss"), line.get("actor_loss")
    actor_weight = line.get("actor_weight", rl_config.acrlpd.loss_weights.actor_weight)
    if not (bc_weight and bc and actor and actor_weight):
        return None  # the run or the line has only one of the two losses
    if not rl_config.improvement.zero_at_best or rl_config.model.has_density:
        return None  # minus a value, or minus the logarithm of a density: the size of such a loss says nothing
    ratio = bc_weight * bc / abs(actor_weight * actor)
    message = (
        f"bc_weight * bc_loss is {ratio:.3g} times actor_weight * actor_loss "
        f"({bc_weight:g} * {bc:.4g} against {actor_weight:g} * {actor:.4g})"
    )
    return Assessment(_range_excess(ratio, BC_RL_RATIOS), message)


@_kind(
    "warning",
    "The learned temperature does not fit the candidates. Above the range all candidates are chosen equally often, "
    "below it always the best one. Set acrlpd.initial_temperature near the candidate_q_std that you see, lower the "
    "temperature's learning rate if the temperature swings, or fix the temperature with acrlpd.learnable_temperature "
    "false.",
)
def temperature_out_of_range(line: Line, values: UsualValues, rl_config: RLTrainConfig) -> Assessment | None:
    alpha, spread = line.get("alpha_value"), line.get("candidate_q_std")
    if alpha is None or not spread or not rl_config.acrlpd.learnable_temperature:
        return None
    low, high = TEMPERATURE_RANGE
    message = (
        f"the temperature is {alpha:.4g}, {alpha / spread:.3g} times the spread of the candidates' values; expected "
        f"{low:g} to {high:g} times"
    )
    return Assessment(_range_excess(alpha / spread, TEMPERATURE_RANGE), message, "temperature")


@_kind(
    "warning",
    "The critics disagree about chunks that they were trained on, so their values of new actions are noise. Train the "
    "critics longer before the policy follows them (acrlpd.critic_warmup_steps), raise the critic learning rate if "
    "they hardly learn, lower critic.kernel_init_scale, or look for contradicting rewards.",
    grace=10,
)
def ensemble_disagreement(line: Line, values: UsualValues, rl_config: RLTrainConfig) -> Assessment | None:
    spread, std, mean = (line.get(name) for name in ("q_ensemble_std", "q_std", "q_mean"))
    if spread is None or std is None or mean is None:
        return None
    ordinary = max(std, 0.1 * abs(mean), 0.05 * values.reward_scale)
    message = (
        f"the critics differ by {spread:.4g} (standard deviation over the ensemble) where Q differs by {std:.4g} "
        f"over the batch, around {mean:.4g}"
    )
    return Assessment(spread / ordinary, message)


@_kind(
    "warning",
    "Best-of-N has no choice: every candidate is the same action, and advantages are noise. The policy has collapsed "
    "onto one action: train less on few demonstrations, use more varied data, make fewer updates per environment "
    "step. Check that the policy's weights are the ones you meant. A pi0_fast policy begins like this from random "
    "weights: until it has learned to write chunks, all of them are zeros.",
)
def dead_candidates(line: Line, values: UsualValues, rl_config: RLTrainConfig) -> Assessment | None:
    spread, n = line.get("candidate_diversity"), rl_config.acrlpd.num_action_samples
    if spread is None or n < 2:
        return None
    message = f"the {n} candidates of an observation are equal: their spread is {spread:.3g} of normalised actions"
    return Assessment(DEAD_CANDIDATE_SPREAD / max(spread, 1e-12), message)


@_kind(
    "warning",
    "The devices wait for batches. Build a frame cache (`acrlpd data cache`), raise data.num_workers and "
    "data.prefetch_batches, or move the data to a local disk.",
    is_timed=True,
)
def data_starvation(line: Line, values: UsualValues, rl_config: RLTrainConfig) -> Assessment | None:
    total = update_time(line)
    if not total:
        return None
    share = line["timing/data_wait_s"] / total
    message = f"updates wait {share:.0%} of their time for data ({format_seconds(line['timing/data_wait_s'])} each)"
    return Assessment(share / DATA_WAIT_SHARE, message)


@_kind(
    "error",
    "Skipped updates leave the run intact, but with many of them nothing is learned. Look for NaN or huge numbers in "
    "the data (`acrlpd data inspect`, norm statistics with a standard deviation near 0), then lower the learning rates "
    "and clip gradients harder.",
    patience=1,
)
def non_finite_updates(line: Line, values: UsualValues, rl_config: RLTrainConfig) -> Assessment | None:
    share = line.get("update_skipped")
    if share is None:
        return None
    culprits: list[Component] = [
        name for name in get_args(Component) if f"{name}_grad_norm" in line and line[f"{name}_grad_norm"] is None
    ]
    message = f"{share:.0%} of the updates since the last line had a gradient that is not finite and were skipped"
    if culprits:
        message += f" (of: {', '.join(culprits)})"
    if line.get("skipped_updates") is not None:
        message += f"; {line['skipped_updates']:.0f} in all"
    return Assessment(2.0 if share > 0 else 0.0, message, culprits[0] if culprits else None)


@_kind(
    "warning",
    "Something else uses the machine, the devices throttle, or the data got slower: compare timing/data_wait_s with "
    "timing/step_s, look at `nvidia-smi`, and profile a few steps (--profile_steps).",
    is_timed=True,
)
def throughput_drop(line: Line, values: UsualValues, rl_config: RLTrainConfig) -> Assessment | None:
    now, usual = update_time(line), values.usual(kind_of_time(line))
    if now is None or usual is None:
        return None
    message = f"an update takes {format_seconds(now)}, {now / usual:.3g} times the usual {format_seconds(usual)}"
    return Assessment(now / (SLOWDOWN_FACTOR * usual), message)
