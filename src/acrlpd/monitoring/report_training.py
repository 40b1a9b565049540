"""How the training went, in sentences that are computed from the metrics of a run's newest phase."""

from collections.abc import Iterator

import numpy as np

from acrlpd.monitoring.anomaly_kinds import DEAD_CANDIDATE_SPREAD
from acrlpd.monitoring.curve_trends import find_trend, in_phase, settled_since
from acrlpd.monitoring.lr_advice import suggest_learning_rates
from acrlpd.monitoring.report_validation import BLIND
from acrlpd.runs.metrics_log import Series
from acrlpd.runs.record import RunRecord
from acrlpd.units import format_percent

# Parts of the total loss: name -> loss, weight.
_LOSSES = {
    "critics": ("critic_loss", "critic_weight"),
    "backup": ("backup_loss", "critic_weight"),
    "improvement": ("actor_loss", "actor_weight"),
    "judge": ("judge_loss", "actor_weight"),
    "cloning": ("bc_loss", "bc_weight"),
    "temperature": ("alpha_loss", "alpha_weight"),
}
# Critics that differ by less than the first share of the spread of Q agree; above the second share they disagree.
_AGREE, _DISAGREE = 0.5, 1.0
# Targets that moved by less than this share of the spread of Q stand still.
_STILL = 0.1
# The newest share of the lines whose mean is "now".
_NOW = 0.1

Sections = dict[str, dict[str, str]]  # title -> label -> sentence


def analyze_training(record: RunRecord) -> Sections:
    """What the curves say about losses, values and policy, and learning rates to try; empty sections are left out."""
    if not record.phases:
        return {}
    sections = {
        "Losses": dict(_loss_facts(record)),
        "Values": dict(_value_facts(record)) if record.has_critic else {},
        "Policy": dict(_policy_facts(record)),
        "Learning rates": {name.capitalize(): text for name, text in suggest_learning_rates(record).items()},
    }
    return {title: found for title, found in sections.items() if found}


def _loss_facts(record: RunRecord) -> Iterator[tuple[str, str]]:
    if (total := _curve(record, "total_loss")) is not None:
        trend = find_trend(total)
        verdict = "shows no trend" if trend.direction == "is flat" else trend.direction
        yield "Trend", f"The total loss {verdict}: {trend}."
    if (shares := loss_shares(record)) is not None:
        yield "Balance", f"Of the total are {', '.join(f'{name} {format_percent(s)}' for name, s in shares.items())}."
    told = [text for name, _ in _LOSSES.values() if (text := _convergence(name, _curve(record, name))) is not None]
    if told:
        yield "Convergence", f"{'; '.join(told)}."


def loss_shares(record: RunRecord) -> dict[str, float] | None:
    """How much each weighted loss is of all of them now, largest first; None if there is only one."""
    sizes = {}
    for name, (loss, weight) in _LOSSES.items():
        of_config = record.config.get(f"acrlpd.loss_weights.{weight}")
        value, factor = _now(record, loss), _now(record, weight)
        factor = of_config if factor is None else factor
        if value is not None and factor:
            sizes[name] = abs(value * factor)
    total = sum(sizes.values())
    if len(sizes) < 2 or not total:
        return None
    return {name: size / total for name, size in sorted(sizes.items(), key=lambda item: -item[1])}


def _convergence(name: str, curve: Series | None) -> str | None:
    """Whether a loss has settled, and where; None for a loss that is always 0 or has too few points."""
    if curve is None or not curve.values.any():
        return None
    trend = find_trend(curve)
    if trend.direction != "is flat":
        return f"{name} still {trend.direction} ({trend})"
    step = settled_since(curve)
    return f"{name} has no trend, but has not settled" if step is None else f"{name} is flat since about step {step:,}"


def _value_facts(record: RunRecord) -> Iterator[tuple[str, str]]:
    spread = _now(record, "q_std")
    if not spread or spread < 0:
        return
    if (between := _now(record, "q_ensemble_std")) is not None:
        share = between / spread
        verdict = "they agree" if share < _AGREE else "they disagree" if share > _DISAGREE else "they agree in part"
        yield "Agreement", f"The critics differ by {format_percent(share)} of the spread of Q over the data: {verdict}."
    targets = _curve(record, "target_q_mean")
    if targets is not None:
        trend = find_trend(targets)
        moved = abs(trend.last - trend.first) / spread
        if trend.direction == "is flat":
            yield "Targets", f"Stable: the mean target has no trend over the last {trend.num_updates:,} updates."
        elif moved < _STILL:
            yield "Targets", f"Stable: the mean target moved by {moved:.2g} times the spread of Q ({trend})."
        else:
            yield "Targets", f"Still moving: by {moved:.2g} times the spread of Q ({trend}). Train the critics longer."
    error, bootstrap = _now(record, "td_error_mean"), _now(record, "bootstrap_ratio")
    if error is not None and bootstrap is not None:
        yield (
            "Bootstrap",
            f"{format_percent(bootstrap)} of the targets bootstrap from a value; the critics miss their targets by "
            f"{error / spread:.2g} times the spread of Q.",
        )


def _policy_facts(record: RunRecord) -> Iterator[tuple[str, str]]:
    if (diversity := _now(record, "candidate_diversity")) is not None:
        verdict = "all candidates are the same" if diversity < DEAD_CANDIDATE_SPREAD else "there is a choice"
        yield "Diversity", f"Candidates lie {diversity:.2g} apart in normalised actions: {verdict}."
    gain, spread = _now(record, "best_of_n_gain"), _now(record, "q_std")
    if gain is not None and spread:
        yield (
            "Best-of-N",
            f"The best candidate is worth {gain:.3g} more than their mean, {gain / spread:.2g} times the spread of Q.",
        )
    series = record.series.get("validation/relative_action_error")
    if series is not None and np.isfinite(series.values[-1]):
        error = float(series.values[-1])
        verdict = "the policy sees" if error < BLIND else "hardly better than a policy that sees nothing"
        yield (
            "Samples",
            f"On held-out episodes the policy errs by {format_percent(error)} of the mean action's error: {verdict}.",
        )


def _curve(record: RunRecord, name: str) -> Series | None:
    return in_phase(record.series.get(name), record.phases[-1])


def _now(record: RunRecord, name: str) -> float | None:
    """The mean over the newest tenth of the phase."""
    curve = _curve(record, name)
    return None if curve is None else float(curve.values[-max(int(_NOW * len(curve.values)), 1) :].mean())
