"""Learning rates to try next, where the curves of a run give a reason. Most runs get no advice."""

import dataclasses

import numpy as np

from acrlpd.monitoring.anomaly_kinds import MUCH_CLIPPED
from acrlpd.monitoring.curve_trends import (
    SPIKE,
    find_trend,
    growth_of_swings,
    in_phase,
    num_spikes,
    second_half,
)
from acrlpd.runs.metrics_log import Phase, Series
from acrlpd.runs.record import RunRecord

# Spikes that are no accident: so many, and this share of the lines.
_FEWEST_SPIKES, _SPIKE_SHARE = 3, 0.01
# Swings that grew by this factor, in a phase with so many lines.
_MORE_SWINGS, _LINES_FOR_SWINGS = 3.0, 80
# An error that rises, or a loss that falls, by this share over the second half of a phase gives a reason.
_MUCH = 0.2


@dataclasses.dataclass(frozen=True)
class _Learner:
    """A part of the agent with a learning rate of its own."""

    name: str
    section: str  # of the config: <section>_lr_schedule, <section>_optimizer
    flag: str
    loss: str


_LEARNERS = (
    _Learner("policy", "actor", "--pi0_lr", "bc_loss"),
    _Learner("critic", "critic", "--critic_lr", "critic_loss"),
)


def suggest_learning_rates(record: RunRecord) -> dict[str, str]:
    """A sentence for each part of the agent whose learning rate the newest phase of a run gives a reason to change."""
    advice = {}
    for learner in _LEARNERS if record.phases else ():
        rate = record.config.get(f"{learner.section}_lr_schedule.peak_lr")
        loss = in_phase(record.series.get(learner.loss), record.phases[-1])
        if not isinstance(rate, int | float) or loss is None:
            continue
        phase = record.phases[-1]
        if (reason := _reason_to_lower(record, learner, loss, phase)) is not None:
            clipped = _describe_clipping(record, learner, phase)
            advice[learner.name] = f"Try half the learning rate ({learner.flag} {rate / 2:g}): {reason}{clipped}."
        elif (reason := _reason_to_raise(record, learner, loss, phase)) is not None:
            advice[learner.name] = f"Twice the learning rate ({learner.flag} {rate * 2:g}) may do: {reason}."
    return advice


def _reason_to_lower(record: RunRecord, learner: _Learner, loss: Series, phase: Phase) -> str | None:
    half = second_half(loss)
    updates = int(half.steps[-1] - half.steps[0])
    spikes = num_spikes(loss)
    if spikes >= _FEWEST_SPIKES and spikes >= _SPIKE_SHARE * len(half.steps):
        return f"{learner.loss} was {spikes} times above {SPIKE:g} times its usual size in the last {updates:,} updates"
    growth = growth_of_swings(loss) if len(loss.steps) >= _LINES_FOR_SWINGS else 1.0
    if growth > _MORE_SWINGS and find_trend(loss).direction != "falls":
        return f"{learner.loss} swings {growth:.1f} times as much as early in the phase, and does not fall"
    name, judged = _judged_curve(record, learner, loss, phase)
    if judged is not None and (rise := find_trend(judged)).direction == "rises" and rise.change > _MUCH:
        return f"{name} rose {rise}"
    return None


def _describe_clipping(record: RunRecord, learner: _Learner, phase: Phase) -> str:
    norms, clip = _gradients(record, learner, phase)
    if norms is None or clip is None:
        return ""
    norm = float(np.median(second_half(norms).values))
    if norm <= MUCH_CLIPPED * clip:
        return ""
    return f"; its gradient norm {norm:.3g} is clipped to {clip:g}, so harder clipping would not help"


def _reason_to_raise(record: RunRecord, learner: _Learner, loss: Series, phase: Phase) -> str | None:
    """A loss that falls fast and smoothly to the end, at a rate that is neither warmed up nor decayed."""
    norms, clip = _gradients(record, learner, phase)
    rates = in_phase(record.series.get(f"{learner.name}_lr"), phase)
    trend = find_trend(loss)
    if norms is None or clip is None or rates is None or trend.direction != "falls" or trend.change > -_MUCH:
        return None
    largest, rates_now = float(second_half(norms).values.max()), second_half(rates).values
    is_calm = num_spikes(loss) == 0 and not record.anomalies and largest < clip
    if not is_calm or rates_now.min() < rates_now.max():
        return None
    return f"{learner.loss} still fell {trend}, and its gradient norm of at most {largest:.3g} is never clipped"


def _judged_curve(record: RunRecord, learner: _Learner, loss: Series, phase: Phase) -> tuple[str, Series | None]:
    """The curve whose rise is trouble.

    The loss of the critics grows with their values, so their error is compared with the spread of the values. The
    policy's cloning loss may rise for a good reason where an improvement moves the policy off the data.
    """
    if learner.name == "policy":
        return learner.loss, loss if record.config.get("acrlpd.loss_weights.actor_weight") == 0 else None
    errors, spreads = (in_phase(record.series.get(name), phase) for name in ("td_error_mean", "q_std"))
    name = "td_error_mean / q_std"
    if errors is None or spreads is None or not np.array_equal(errors.steps, spreads.steps):
        return name, None
    if spreads.values.min() <= 0:
        return name, None
    return name, Series(errors.steps, errors.values / spreads.values)


def _gradients(record: RunRecord, learner: _Learner, phase: Phase) -> tuple[Series | None, float | None]:
    """The norms of the gradient before clipping, and the norm that it is clipped to."""
    clip = record.config.get(f"{learner.section}_optimizer.clip_gradient_norm")
    norms = in_phase(record.series.get(f"{learner.name}_grad_norm"), phase)
    return norms, float(clip) if isinstance(clip, int | float) else None
