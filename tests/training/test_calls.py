"""Many updates in one call of the train step: how many, and that their number changes nothing."""

import math
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_helpers import arrays_of, assert_equal_arrays, metrics_of, online_config, train_here

from acrlpd.agents import Agent, MetricsTable
from acrlpd.config import RLTrainConfig, apply_config_overrides, get_config
from acrlpd.data.pipeline import device_rows
from acrlpd.runs.directory import run_directory
from acrlpd.training import calls
from acrlpd.training.calls import CALL_S, CallLengths, next_multiple
from acrlpd.training.learner import Learner
from acrlpd.training.online.phase import OnlinePhase
from acrlpd.training.online.records import Round
from acrlpd.training.online.rounds import Player

OFFLINE, ONLINE = 30, 25


class DrivenTime:
    """Stands in for the module `time`, and moves only when a test moves it."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Iterator[DrivenTime]:
    driven = DrivenTime()
    monkeypatch.setattr(calls, "time", driven)
    yield driven


def make_call(lengths: CallLengths, time: DrivenTime, update_s: float, pause_s: float = 0.0) -> int:
    """Lets a call run to its end; returns its length."""
    length = lengths.next(0, 10**9)
    time.now += length * update_s + pause_s
    lengths.end(length)
    return length


def test_calls_grow_to_a_quarter_of_a_second(time: DrivenTime) -> None:
    lengths = CallLengths(512, is_timed=True)
    found = [make_call(lengths, time, update_s=0.002) for _ in range(4)]
    assert found == [1, 1, 125, 125]  # the first call compiles, and its time is not known


def test_slow_updates_are_made_one_by_one(time: DrivenTime) -> None:
    lengths = CallLengths(512, is_timed=True)
    assert {make_call(lengths, time, update_s=2 * CALL_S) for _ in range(4)} == {1}


def test_a_pause_shortens_calls_only_a_little_and_not_for_long(time: DrivenTime) -> None:
    lengths = CallLengths(512, is_timed=True)
    for _ in range(4):
        make_call(lengths, time, update_s=0.002)
    make_call(lengths, time, update_s=0.002, pause_s=60.0)  # a checkpoint
    assert [make_call(lengths, time, update_s=0.002) for _ in range(2)] == [83, 125]


def test_a_busy_host_does_not_make_calls_explode(time: DrivenTime) -> None:
    """Two calls are under way. Both are long finished when the host comes back and looks, one right after the other."""
    lengths = CallLengths(512, is_timed=True)
    for _ in range(5):
        make_call(lengths, time, update_s=0.02)
    first, second = lengths.next(0), lengths.next(0)
    assert first == second == 12
    time.now += 2.0
    lengths.end(first)
    time.now += 1e-5
    lengths.end(second)
    assert lengths.next(0) <= 2 * 12


def test_the_first_call_after_a_pause_is_not_timed(time: DrivenTime) -> None:
    lengths = CallLengths(512, is_timed=True)
    for _ in range(4):
        make_call(lengths, time, update_s=0.002)
    lengths.pause()
    time.now += 60.0  # an evaluation
    assert [make_call(lengths, time, update_s=0.002) for _ in range(3)] == [125, 125, 125]


class OnePolicy(Player):
    """Wants a newer policy after `updates` updates."""

    def __init__(self, updates: int) -> None:
        self.updates = updates

    def update_policy(self, agent: Agent, step: int) -> None: ...

    def round(self, number: int) -> Round:
        raise AssertionError

    def updates_with_one_policy(self, step: int) -> int:
        return self.updates


@given(
    ratio=st.sampled_from([0.04, 0.1, 0.125, 0.3, 0.5, 0.7, 1.0, 1.5, 3.0]),
    env_steps=st.integers(20, 400),
    made=st.floats(0, 1),
    updates=st.integers(1, 1000),
)
def test_updates_until_the_next_round_are_all_that_need_none(
    ratio: float, env_steps: int, made: float, updates: int
) -> None:
    config = apply_config_overrides(
        get_config("quickstart"), {"online.start_steps": 20, "online.update_to_data_ratio": ratio}
    )
    online = OnlinePhase(config, None, None, OnePolicy(updates))  # type: ignore[arg-type]  # nobody asks them
    online.totals["env_steps"] = env_steps
    without_round = [update for update in range(1500) if 20 + math.ceil(update / ratio) <= env_steps]
    update = int(made * without_round[-1])
    assert online.updates_ahead(7 + update, update) == min(without_round[-1] - update + 1, updates)
    assert not online.needs_round(without_round[-1]) and online.needs_round(without_round[-1] + 1)


def test_updates_that_become_slower_shorten_calls(time: DrivenTime) -> None:
    lengths = CallLengths(512, is_timed=True)
    for _ in range(3):
        make_call(lengths, time, update_s=0.002)
    for _ in range(10):
        make_call(lengths, time, update_s=0.02)
    assert make_call(lengths, time, update_s=0.02) == 12


def test_a_call_ends_where_something_is_due() -> None:
    lengths = CallLengths(64, is_timed=False)
    assert lengths.next(10, 1_000, 30, 25, 10, 4) == 15  # the stops up to here are past
    assert lengths.next(10, 1_000) == 64
    assert [next_multiple(step, 10) for step in (0, 9, 10, 11)] == [10, 10, 20, 20]


def config_of(directory: pathlib.Path, name: str, **changes: object) -> RLTrainConfig:
    """Lines, checkpoints, evaluations, rounds, warm-ups and phases end at different steps."""
    return online_config(
        directory,
        exp_name=name,
        offline_steps=OFFLINE,
        online_steps=ONLINE,
        online__start_steps=20,
        online__update_to_data_ratio=0.7,
        online__critic_warmup_steps=3,
        online__final_bc_weight=0.25,
        online__bc_weight_decay_steps=15,
        acrlpd__critic_warmup_steps=6,
        log_frequency=7,
        save_frequency=20,
        eval_frequency=15,
        **changes,
    )


@pytest.mark.parametrize("on_device", ["always", pytest.param("never", marks=pytest.mark.slow)])
def test_the_lengths_of_calls_change_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, on_device: str
) -> None:
    """Metrics, replay and state of a run with an online phase are the same to the last bit.

    Where the data lies on the devices, the replay of the run with long calls outgrows its place.
    """
    update, made = Learner.update, []

    def watched(self: Learner, calls: Any, active: Any, num_updates: int, *, update_policy: bool) -> MetricsTable:
        made.append(num_updates)
        return update(self, calls, active, num_updates, update_policy=update_policy)

    monkeypatch.setattr(Learner, "update", watched)
    monkeypatch.setattr(device_rows, "_BLOCK", 1)
    expected_rows = device_rows.expected_replay_rows
    configs = [
        config_of(tmp_path, str(length), training__updates_per_call=length, data__on_device=on_device)
        for length in (1, 5)
    ]
    for config, few_rows in zip(configs, (False, True), strict=True):
        monkeypatch.setattr(device_rows, "expected_replay_rows", (lambda _: 1) if few_rows else expected_rows)
        train_here(config)
    assert made[: OFFLINE + ONLINE] == [1] * (OFFLINE + ONLINE) and max(made) == 5
    expected, found = (run_directory(config) for config in configs)
    lines = [line for line in metrics_of(expected) if "phase" in line]
    assert {line["bc_weight"] for line in lines if line["phase"] == "offline"} == {1.0}
    assert lines[-1]["bc_weight"] == 0.25
    assert metrics_of(found) == metrics_of(expected)
    last = str(OFFLINE + ONLINE)
    assert_equal_arrays(arrays_of(found / last), arrays_of(expected / last))
    replays = [sorted((run / "replay").iterdir()) for run in (found, expected)]
    assert [path.read_bytes() for path in replays[0]] == [path.read_bytes() for path in replays[1]]
