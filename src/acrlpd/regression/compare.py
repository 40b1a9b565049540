"""Compares a measurement with its baseline, with a test for each quantity that fits how the quantity varies.

Early losses are those of the same seeds before rounding has grown, so each seed is compared with itself. At the end of
a run, rounding on another processor may have led a seed elsewhere. The mean over the seeds may then move as far as the
spread over seeds explains (a prediction interval of Student's t). A fall of success counts if neither the chance of the
episodes (Fisher's exact test) nor the chance of the seeds (Student's t) explains the fall. Operations, compiled memory
and compilations follow from the program and have narrow bounds. Processor time and host memory vary from run to run and
have wide bounds.
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from acrlpd.regression.baseline import Measurement, Success
from acrlpd.units import format_bytes, format_percent

Verdict = Literal["ok", "better", "REGRESSION"]
Show = Callable[[float], str]
# How far new values, one for each seed, are from those of the baseline.
Distance = Callable[[Sequence[float], Sequence[float]], float]

# The probability that some loss of a scenario, or its success, is called a regression although nothing has changed, if
# every training drew new random numbers. The same seeds on the same machine give the same numbers, and no false alarm.
_FALSE_ALARMS = 0.01
# Rounding moves a loss by less than this share of it, also where seeds have no spread.
_ROUNDING = 1e-3
# An early loss may differ from that of the same seed by this share of the spread over seeds, in the mean over seeds.
_EARLY_SPREADS = 0.5
# How many times the baseline a quantity may be: as the baseline was made, and in other conditions (another processor,
# another version of JAX, or for noisy quantities a busy machine).
_MOST_FLOPS = 1.001
_MOST_COMPILATIONS = (1.0, 1.5)
_MOST_PROGRAM_BYTES = (1.02, 1.25)
_MOST_HOST_BYTES = (1.25, 2.0)
_MOST_COST = (1.5, 4.0)
# A measure of time may also exceed its baseline by so many times the relative spread of its stretches.
_COST_SPREADS = 4.0


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    quantity: str
    baseline: str
    now: str
    allowed: str
    verdict: Verdict


def compare(baseline: Measurement, now: Measurement, *, is_busy: bool = False) -> list[Row]:
    """All quantities. `is_busy` says that other programs use the machine: then noisy quantities have wider bounds."""
    is_elsewhere = baseline.origin.machine != now.origin.machine
    has_other_jax = (baseline.origin.jax, baseline.origin.jaxlib) != (now.origin.jax, now.origin.jaxlib)
    most_bytes = _MOST_PROGRAM_BYTES[is_elsewhere or has_other_jax]
    # Another version of JAX may divide the same work into other programs.
    most_compilations = _MOST_COMPILATIONS[has_other_jax]
    most_host_bytes, most_cost = _MOST_HOST_BYTES[is_elsewhere or is_busy], _MOST_COST[is_elsewhere or is_busy]
    return [
        *_compare_losses(baseline, now),
        *_compare_successes(baseline, now),
        _compare_most("operations of an update", baseline.update_flops, now.update_flops, _MOST_FLOPS, _show_flops),
        _compare_most("compiled memory", baseline.program_bytes, now.program_bytes, most_bytes, format_bytes),
        _compare_most(
            "compilations", baseline.num_compilations, now.num_compilations, most_compilations, "{:.0f}".format
        ),
        _compare_most("peak host memory", baseline.peak_host_bytes, now.peak_host_bytes, most_host_bytes, format_bytes),
        _compare_cost(baseline.update_cost, now.update_cost, most_cost),
        _compare_names(baseline, now),
        _compare_export(baseline, now),
    ]


# -- losses


def _compare_losses(baseline: Measurement, now: Measurement) -> Iterator[Row]:
    level = _FALSE_ALARMS / max(1, len(baseline.final))
    for name, values in baseline.early.items():
        if (old := _finite(values)) is not None:
            yield _compare_loss(f"{name}, early", old, now.early.get(name), _distance_of_seeds, allowed_early(old))
    for name, values in baseline.final.items():
        if (old := _finite(values)) is not None:
            allowed = allowed_shift(old, len(now.seeds), level)
            yield _compare_loss(name, old, now.final.get(name), _distance_of_means, allowed)


def _finite(values: Sequence[float | None]) -> list[float] | None:
    """The values, unless one of them is not finite: nothing can be compared with such a baseline."""
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else None


def _compare_loss(
    quantity: str, old: list[float], values: Sequence[float | None] | None, distance: Distance, allowed: float
) -> Row:
    """A loss that is too low is as wrong as one that is too high: both say that something else was computed."""
    row = functools.partial(Row, quantity, _show_loss(statistics.mean(old)), allowed=f"+- {_show_loss(allowed)}")
    if values is None:
        return row(now="missing", verdict="REGRESSION")
    new = _finite(values)
    if new is None:
        return row(now="not finite", verdict="REGRESSION")
    verdict: Verdict = "ok" if distance(old, new) <= allowed else "REGRESSION"
    return row(now=_show_loss(statistics.mean(new)), verdict=verdict)


def _distance_of_seeds(old: Sequence[float], new: Sequence[float]) -> float:
    return statistics.mean(abs(a - b) for a, b in zip(old, new, strict=True))


def _distance_of_means(old: Sequence[float], new: Sequence[float]) -> float:
    return abs(statistics.mean(old) - statistics.mean(new))


def allowed_early(values: Sequence[float]) -> float:
    """How far a seed may be from itself, in the mean over the seeds."""
    return max(_EARLY_SPREADS * statistics.stdev(values), _ROUNDING * abs(statistics.mean(values)))


def allowed_shift(values: Sequence[float], count: int, level: float) -> float:
    """How far the mean of `count` new values may lie from the mean of these values: two-sided, by Student's t."""
    from scipy.special import stdtrit

    spread = statistics.stdev(values) * math.sqrt(1 / len(values) + 1 / count)
    return max(float(stdtrit(len(values) - 1, 1 - level / 2)) * spread, _ROUNDING * abs(statistics.mean(values)))


def _show_loss(value: float) -> str:
    return f"{value:.3g}"


# -- success


def _compare_successes(baseline: Measurement, now: Measurement) -> Iterator[Row]:
    for phase, old in baseline.success.items():
        quantity, least = f"success {phase}", least_success(old, now.success.get(phase, old))
        allowed = f"at least {format_percent(least)}"
        if phase not in now.success:
            yield Row(quantity, _show_success(old), "missing", allowed, "REGRESSION")
            continue
        rate = _rate(now.success[phase])
        verdict: Verdict = "REGRESSION" if rate < least else "better" if rate > old.interval[1] else "ok"
        yield Row(quantity, _show_success(old), _show_success(now.success[phase]), allowed, verdict)


def least_success(old: Success, new: Success) -> float:
    """The lowest rate of `new` that chance explains: that of its episodes, or that of its seeds."""
    trials = sum(new.episodes)
    by_episodes = next(x for x in range(trials + 1) if _fisher(sum(old.successes), sum(old.episodes), x, trials))
    rates = [successes / episodes for successes, episodes in zip(old.successes, old.episodes, strict=True)]
    by_seeds = statistics.mean(rates) - allowed_shift(rates, len(new.episodes), 2 * _FALSE_ALARMS)
    return max(0.0, min(by_episodes / trials, by_seeds))


def _fisher(old: int, old_trials: int, new: int, new_trials: int) -> bool:
    """Whether so few new successes may be chance, by Fisher's exact test (one-sided)."""
    from scipy.stats import hypergeom

    chance = hypergeom.cdf(new, old_trials + new_trials, old + new, new_trials)
    return bool(chance >= _FALSE_ALARMS)


def _rate(success: Success) -> float:
    return sum(success.successes) / sum(success.episodes)


def _show_success(success: Success) -> str:
    return f"{format_percent(_rate(success))} of {sum(success.episodes)}"


# -- the program and its costs


def _compare_most(quantity: str, old: float, new: float, factor: float, show: Show) -> Row:
    """A quantity that may shrink, and grow by a factor."""
    most = factor * old
    verdict: Verdict = "REGRESSION" if new > most else "better" if old > factor * new else "ok"
    return Row(quantity, show(old), show(new), f"at most {show(most)}", verdict)


def _compare_cost(old: Sequence[float], new: Sequence[float], factor: float) -> Row:
    """Medians over stretches, so that a few stretches that something has disturbed do not count."""
    spread = math.hypot(relative_spread(old), relative_spread(new))
    factor = max(factor, 1 + _COST_SPREADS * spread)
    return _compare_most(
        "processor time of an update", statistics.median(old), statistics.median(new), factor, lambda x: f"{x:.3g} x"
    )


def relative_spread(values: Sequence[float]) -> float:
    """The standard error of the median, relative to it, from the middle half of the values."""
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / 1.35 / middle * math.sqrt(math.pi / 2 / len(values))


def _show_flops(flops: float) -> str:
    return f"{flops / 1e6:,.4g} MFLOP"


# -- interfaces


def _compare_names(baseline: Measurement, now: Measurement) -> Row:
    """Programs of others read metrics by name: a name may be added, not taken away."""
    missing = sorted(set(baseline.metric_names) - set(now.metric_names))
    shown = f"without {', '.join(missing)}" if missing else str(len(now.metric_names))
    return Row(
        "names of metrics", str(len(baseline.metric_names)), shown, "all of them", "REGRESSION" if missing else "ok"
    )


def _compare_export(baseline: Measurement, now: Measurement) -> Row:
    """The export itself refuses a policy that acts differently, or that openpi would not load."""
    verdict: Verdict = "REGRESSION" if now.problems and not baseline.problems else "ok"
    before, after = (f"{len(one.problems)} problems" if one.problems else "same actions" for one in (baseline, now))
    return Row("checkpoint and export", before, after, "same actions", verdict)
