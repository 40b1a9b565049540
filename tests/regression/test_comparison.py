"""Which differences between two measurements are regressions."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measurements import ORIGIN, measurement, success
from scipy.stats import fisher_exact

from acrlpd.regression.compare import allowed_shift, compare, least_success

finite = st.floats(-1e6, 1e6, allow_nan=False)


def regressions(*, busy: bool = False, **changes: Any) -> list[str]:
    rows = compare(measurement(), measurement(**changes), is_busy=busy)
    return [row.quantity for row in rows if row.verdict == "REGRESSION"]


@settings(max_examples=30)
@given(
    early=st.tuples(finite, finite, finite, finite),
    final=st.tuples(finite, finite, finite, finite),
    rates=st.lists(st.integers(0, 25), min_size=4, max_size=4),
    cost=st.lists(st.floats(1e-4, 1e4), min_size=9, max_size=9),
)
def test_nothing_is_a_regression_against_itself(
    early: tuple[float, ...], final: tuple[float, ...], rates: list[int], cost: list[float]
) -> None:
    same = measurement(
        early={"critic_loss": early},
        final={"critic_loss": final},
        success={"online": success(*rates)},
        update_cost=tuple(cost),
    )
    assert {row.verdict for row in compare(same, same)} <= {"ok"}


def test_an_early_loss_is_compared_seed_by_seed() -> None:
    """The same values in another order have the same mean, and no seed has its own value."""
    assert regressions(early={"critic_loss": (0.9, 1.0, 1.1, 1.05), "actor_loss": (0.0,) * 4}) == ["critic_loss, early"]
    rounded = tuple(1.0001 * value for value in measurement().early["critic_loss"])
    assert regressions(early={"critic_loss": rounded, "actor_loss": (0.0,) * 4}) == []


@pytest.mark.parametrize("values", [(5.0, 5.1, 4.9, 5.0), (0.05, 0.055, 0.045, 0.052), (0.5, None, 0.5, 0.5)])
def test_a_final_loss_far_away_is_found_in_both_directions(values: tuple[float | None, ...]) -> None:
    assert regressions(final={"critic_loss": values, "actor_loss": (0.0,) * 4}) == ["critic_loss"]


def test_a_loss_that_disappears_is_found() -> None:
    found = measurement()
    assert regressions(early={"actor_loss": found.early["actor_loss"]}) == ["critic_loss, early"]


def test_the_interval_of_a_final_loss_has_the_coverage_that_it_states() -> None:
    """Brute force: how often the mean of new seeds leaves the interval that other seeds gave, if nothing changed."""
    rng, level = np.random.default_rng(0), 0.05
    draws = [(rng.normal(3.0, 2.0, 5), rng.normal(3.0, 2.0, 5).mean()) for _ in range(2_000)]
    outside = [abs(new - old.mean()) > allowed_shift(list(old), 5, level) for old, new in draws]
    assert np.mean(outside) == pytest.approx(level, abs=0.015)


@pytest.mark.parametrize("old", [(25, 25, 25, 25), (21, 18, 22, 25), (3, 0, 1, 2), (0, 0, 0, 0)])
def test_a_fall_of_success_needs_more_than_the_chance_of_the_episodes(old: tuple[int, ...]) -> None:
    before = success(*old)
    least = least_success(before, before)
    for now in range(101):
        if now / 100 < least:
            table = [[now, 100 - now], [sum(old), 100 - sum(old)]]
            assert fisher_exact(table, alternative="less").pvalue < 0.01


def test_a_fall_of_success_needs_more_than_the_chance_of_the_seeds() -> None:
    """Half of the seeds fail: with so many episodes Fisher's test would call every other draw of seeds a fall."""
    spread = success(250, 250, 0, 0, episodes=250)
    assert least_success(spread, spread) == 0.0
    even = success(250, 250, 250, 250, episodes=250)
    assert least_success(even, even) > 0.95


def test_success_that_falls_is_a_regression_and_success_that_rises_is_none() -> None:
    assert regressions(success={"offline": success(0, 0, 0, 0)}) == ["success offline"]
    assert regressions(success={"offline": success(25, 25, 25, 25)}) == []
    assert regressions(success={}) == ["success offline"]


@pytest.mark.parametrize(
    ("factor", "changes", "is_found"),
    [
        (1.3, {}, False),
        (2.0, {}, True),
        (0.2, {}, False),
        (2.0, {"busy": True}, False),
        (5.0, {"busy": True}, True),
        (2.0, {"origin": dataclasses.replace(ORIGIN, processor="another one")}, False),
        (5.0, {"origin": dataclasses.replace(ORIGIN, cores=64)}, True),
    ],
)
def test_processor_time_has_wider_bounds_where_it_varies_more(
    factor: float, changes: dict[str, Any], is_found: bool
) -> None:
    slower = tuple(factor * ratio for ratio in measurement().update_cost)
    assert regressions(update_cost=slower, **changes) == (["processor time of an update"] if is_found else [])


def test_a_few_disturbed_stretches_do_not_count() -> None:
    first, second, *rest = measurement().update_cost
    assert regressions(update_cost=(100 * first, 100 * second, *rest)) == []


def test_what_follows_from_the_program_has_narrow_bounds() -> None:
    assert regressions(update_flops=2.01e7) == ["operations of an update"]
    assert regressions(program_bytes=2_100_000) == ["compiled memory"]
    assert regressions(num_compilations=15) == ["compilations"]
    assert regressions(update_flops=1e7, program_bytes=1_000_000, num_compilations=3) == []
    newer = dataclasses.replace(ORIGIN, jax="0.11.0")
    assert regressions(program_bytes=2_100_000, num_compilations=15, origin=newer) == []


def test_a_metric_may_be_added_and_not_taken_away() -> None:
    assert regressions(metric_names=("actor_loss", "critic_loss", "new")) == []
    assert regressions(metric_names=("critic_loss", "new")) == ["names of metrics"]


def test_an_export_that_acts_differently_is_found() -> None:
    assert regressions(problems=("export: the exported policy acts differently",)) == ["checkpoint and export"]


def test_a_baseline_that_is_not_finite_is_not_compared() -> None:
    broken = measurement(final={"critic_loss": (0.5, None, 0.4, 0.5)})
    assert not any(row.quantity == "critic_loss" for row in compare(broken, measurement()))
