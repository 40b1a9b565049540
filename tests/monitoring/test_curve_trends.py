"""Curves whose answer is known: noise, lines, decays, spikes."""

import numpy as np
import pytest

from acrlpd.monitoring.curve_trends import (
    MIN_POINTS,
    find_trend,
    growth_of_swings,
    in_phase,
    num_spikes,
    settled_since,
)
from acrlpd.runs.metrics_log import Phase, Series

STEPS = np.arange(10, 4001, 10)


def curve(values: np.ndarray) -> Series:
    return Series(STEPS, np.asarray(values, float))


def noise(seed: int, scale: float) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, len(STEPS))


def test_noise_has_no_trend() -> None:
    found = [find_trend(curve(1 + noise(seed, 0.3))).direction for seed in range(200)]
    assert found.count("is flat") >= 196


@pytest.mark.parametrize(("slope", "direction"), [(-0.4, "falls"), (0.4, "rises"), (0.004, "is flat")])
def test_a_line_in_noise(slope: float, direction: str) -> None:
    values = 1 + slope * STEPS / STEPS[-1]
    for seed in range(20):
        trend = find_trend(curve(values + noise(seed, 0.05)))
        assert trend.direction == direction
        assert trend.num_updates == pytest.approx(STEPS[-1] / 2, rel=0.01)
        assert trend.first == pytest.approx(1 + slope / 2, abs=0.05)
        assert trend.last == pytest.approx(1 + slope, abs=0.05)


def test_outliers_do_not_make_a_trend() -> None:
    values = 1 + noise(0, 0.05)
    values[-15:-10] = 100.0
    assert find_trend(curve(values)).direction == "is flat"


def test_where_a_decay_settles() -> None:
    """exp(-t / 200) is below 2 % of the level 1 from step 780 on."""
    step = settled_since(curve(1 + np.exp(-STEPS / 200)))
    assert step is not None and 700 <= step <= 900
    assert settled_since(curve(1 + np.exp(-STEPS / 5000))) is None  # it falls to the end
    assert settled_since(curve(1 + noise(1, 0.1))) is not None


def test_spikes_are_counted_in_the_second_half() -> None:
    values = 1 + noise(0, 0.1)
    values[[50, 250, 300, 399]] = 8.0
    assert num_spikes(curve(values)) == 3
    assert num_spikes(curve(1 + noise(0, 0.3))) == 0
    assert num_spikes(curve(-values)) == 0  # a loss that may be negative has no usual size


def test_swings_that_grow() -> None:
    assert growth_of_swings(curve(1 + noise(0, 0.05))) == pytest.approx(1, abs=0.35)
    growing = np.where(STEPS > 3000, 6.0, 1.0) * noise(0, 0.05)
    assert growth_of_swings(curve(1 + growing)) == pytest.approx(6, rel=0.35)
    assert growth_of_swings(curve(np.ones(len(STEPS)))) == 1


def test_a_phase_has_its_own_points() -> None:
    values = np.ones(len(STEPS))
    values[5] = np.nan
    found = in_phase(curve(values), Phase("offline", 10, 1000))
    assert found is not None and len(found.steps) == 99 and found.steps[-1] == 1000
    assert in_phase(curve(values), Phase("online", 1000, 1000 + 10 * (MIN_POINTS - 2))) is None
    assert in_phase(None, Phase("offline", 10, 1000)) is None
