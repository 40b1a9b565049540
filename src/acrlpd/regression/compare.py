"""Compares a measurement with its baseline, with a test for each quantity that fits how the quantity varies.

Losses: the mean over the seeds may move as far as the spread over seeds explains (a prediction interval of Student's
t). Success: a fall counts if neither the chance of the episodes (Fisher's exact test) nor that of the seeds (Student's
t) explains it. Operations, compiled memory and compilations follow from the program and have narrow bounds. Processor
time and host memory vary from run to run and have wide ones.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from acrlpd.regression.baseline import Measurement, Success
from acrlpd.units import format_bytes, format_percent, short

Verdict = Literal["ok", "better", "REGRESSION"]
Show = Callable[[float], str]

# How often all losses of a scenario together may move by chance as far as a regression has to, if nothing has changed
# and every training were a new draw. The same seeds on the same machine give the same numbers, so it is less often.
_FALSE_ALARMS = 0.01
# Rounding on another processor moves a mean by less than this share of it, also where seeds have no spread.
_ROUNDING = 1e-3
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
        *_compare_metrics(baseline, now),
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


def _compare_metrics(baseline: Measurement, now: Measurement) -> Iterator[Row]:
    level = _FALSE_ALARMS / max(1, len(baseline.metrics))
    for name, values in baseline.metrics.items():
        old, new = [v for v in values if v is not None], [v for v in now.metrics.get(name, ()) if v is not None]
        if len(old) < len(values):
            continue  # A number that was not finite in the baseline says nothing.
        mean, half = statistics.mean(old), allowed_shift(old, len(now.seeds), level)
        allowed = f"{short(mean - half)} to {short(mean + half)}"
        if len(new) < len(now.seeds):
            shown = "missing" if name not in now.metrics else "not finite"
            yield Row(name, short(mean), shown, allowed, "REGRESSION")
        else:
            is_inside = abs(statistics.mean(new) - mean) <= half
            yield Row(name, short(mean), short(statistics.mean(new)), allowed, "ok" if is_inside else "REGRESSION")


def allowed_shift(values: Sequence[float], count: int, level: float) -> float:
    """How far the mean of `count` new values may lie from the mean of these values: two-sided, by Student's t."""
    from scipy.special import stdtrit

    spread = statistics.stdev(values) * math.sqrt(1 / len(values) + 1 / count)
    return max(float(stdtrit(len(values) - 1, 1 - level / 2)) * spread, _ROUNDING * abs(statistics.mean(values)))


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
    return Row("checkpoint and export", _show_export(baseline), _show_export(now), "same actions", verdict)


def _show_export(measured: Measurement) -> str:
    if measured.problems:
        return f"{len(measured.problems)} problems"
    return "same actions"
