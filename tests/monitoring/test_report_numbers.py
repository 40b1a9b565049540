"""What the report says: verdicts, differences with intervals, curves in few points."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_factory import make_run

from acrlpd.evaluation.statistics import wilson_interval
from acrlpd.monitoring.report_curves import create_curves, downsample
from acrlpd.monitoring.report_facts import (
    config_differences,
    final_stages,
    overview,
    plan_comparison,
    shown_evaluation,
)
from acrlpd.monitoring.report_verdict import difference, judge
from acrlpd.runs.metrics_log import Series
from acrlpd.runs.record import Outcome, RunRecord, read_run


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return read_run(make_run(tmp_path_factory.mktemp("runs") / "whole"))


def outcome(successes: int, episodes: int = 50) -> Outcome:
    return Outcome(successes / episodes, episodes, wilson_interval(successes, episodes))


def stages(record: RunRecord, **successes: int) -> RunRecord:
    return dataclasses.replace(record, stages={name: outcome(count) for name, count in successes.items()}, anomalies=())


def test_newcombes_interval_of_a_known_difference() -> None:
    """56/70 against 48/80 gives 0.2 (0.0524 to 0.3339): method 10 in Newcombe (1998), table II."""
    found = difference(outcome(56, 70), outcome(48, 80))
    assert (found.value, found.low, found.high) == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)


@given(st.integers(0, 50), st.integers(0, 50))
def test_differences_are_antisymmetric_and_clear_only_off_zero(first: int, second: int) -> None:
    there, back = difference(outcome(first), outcome(second)), difference(outcome(second), outcome(first))
    assert (there.value, there.low, there.high) == pytest.approx((-back.value, -back.high, -back.low))
    assert there.low <= there.value <= there.high
    assert there.is_clear == back.is_clear == (there.low * there.high > 0)


@pytest.mark.parametrize(
    ("successes", "tone", "words"),
    [
        ({"bc": 20, "offline": 40}, "good", "RL beat imitation by 40 points: 80 % against 40 %"),
        ({"bc": 40, "offline": 20}, "bad", "RL did worse than imitation by 40 points: 40 % against 80 %"),
        ({"bc": 20, "offline": 22}, "unclear", "No clear difference between RL and imitation: 44 % against 40 %"),
        ({"bc": 20, "offline": 22, "online": 45}, "good", "RL beat imitation by 50 points: 90 % against 40 %"),
        (
            {"bc": 20, "bc_success_only": 40, "offline": 42},
            "unclear",
            "RL beat imitation by 44 points: 84 % against 40 %, but imitating only the successes may do as well",
        ),
    ],
)
def test_the_headline_says_who_won_by_how_much(
    record: RunRecord, successes: dict[str, int], tone: str, words: str
) -> None:
    verdict = judge(stages(record, **successes))
    assert (verdict.tone, verdict.headline) == (tone, words)
    assert any("over 50 episodes each" in sentence and "95 %" in sentence for sentence in verdict.sentences)


def test_controls_may_explain_the_gain_away(record: RunRecord) -> None:
    explained = judge(stages(record, bc=10, bc_success_only=38, offline=20, offline_continued=39, online=40)).sentences
    assert any("filtering the data might do as well" in sentence for sentence in explained)
    assert any("training longer might do as well" in sentence for sentence in explained)
    real = judge(stages(record, bc=10, bc_success_only=12, offline=20, offline_continued=20, online=45)).sentences
    assert any("filtering the data does not explain the gain" in sentence for sentence in real)
    assert any("training longer does not explain the gain" in sentence for sentence in real)
    worse = judge(stages(record, bc=5, bc_success_only=45, offline=20, offline_continued=40, online=20)).sentences
    assert any("filtering the data does better" in sentence for sentence in worse)
    assert any("training longer does better" in sentence for sentence in worse)
    nothing = judge(stages(record, bc=0, bc_success_only=0, offline=0, offline_continued=0, online=0)).sentences
    assert any("No policy ever succeeded" in sentence for sentence in nothing)
    assert not any("might do as well" in sentence for sentence in nothing)


def test_without_baselines_nothing_is_claimed(record: RunRecord) -> None:
    verdict = judge(stages(record, offline=40))
    assert verdict.tone == "none" and verdict.headline == "Success 85 % at step 2,500, from 36 % at step 250"
    assert any("no imitation baseline" in sentence for sentence in verdict.sentences)
    blind = dataclasses.replace(stages(record), series={"total_loss": record.series["total_loss"]})
    assert judge(blind).headline == "This run was not evaluated"


def test_a_run_that_did_not_end_or_was_in_trouble_says_so(record: RunRecord) -> None:
    assert any("Anomalies: 3, 1 of them grave (q divergence)" in s for s in judge(record).sentences)
    cut_off = judge(dataclasses.replace(record, summary={}))
    assert any("under way or was cut off" in sentence for sentence in cut_off.sentences)
    stopped = judge(dataclasses.replace(record, summary={"status": "stopped by SIGTERM"}))
    assert any("stopped by SIGTERM at step 2,500" in sentence for sentence in stopped.sentences)


def test_a_checkpoint_that_training_removes_while_the_run_is_read_is_left_out(tmp_path: Path) -> None:
    """A link that leads nowhere is in the list of the directory and is gone when it is looked at."""
    run = make_run(tmp_path / "run")
    there = read_run(run).checkpoints
    (run / "7").symlink_to(run / "removed")
    assert there and read_run(run).checkpoints == there


def test_a_resumed_run_is_under_way_until_it_writes_another_summary(tmp_path: Path) -> None:
    run = make_run(tmp_path / "resumed", anomalies=False)
    assert read_run(run).status == "finished"
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2600, "phase": "online", "total_loss": 1.0}\n')
    record = read_run(run)
    assert record.summary == {} and overview(record)["updates"] == "2,600 of 2,500"
    assert any("under way or was cut off" in sentence for sentence in judge(record).sentences)


def test_plan_against_measurement(record: RunRecord) -> None:
    memory, time = plan_comparison(record).values()
    assert memory == ("2.79 GiB", "3.17 GiB", "1.13")
    assert (time[0], time[2]) == ("100 ms", "1.30")
    unplanned = plan_comparison(dataclasses.replace(record, summary={"peak_device_bytes": None}))
    assert [planned for planned, _, _ in unplanned.values()] == ["–", "–"]
    assert unplanned["peak memory per device"][1] == "3.17 GiB"  # from the metrics


def test_the_end_of_the_last_phase_is_shown(record: RunRecord) -> None:
    assert shown_evaluation(record) == ("Online RL", 2500)
    assert final_stages(record)[0].label == "Imitation"
    assert shown_evaluation(dataclasses.replace(record, stages={})) == ("Step 2,500", 2500)
    assert shown_evaluation(dataclasses.replace(record, evaluations={})) is None
    without_rl = {"acrlpd.loss_weights.critic_weight": 0.0, "acrlpd.loss_weights.actor_weight": 0.0}
    cloned = dataclasses.replace(stages(record, offline=20), config=without_rl)
    assert [stage.label for stage in final_stages(cloned)] == ["Imitation"] and shown_evaluation(cloned) is None
    assert any("it is imitation" in sentence for sentence in judge(cloned).sentences)
    compared = dataclasses.replace(cloned, stages=stages(record, bc=10, offline=40).stages)
    assert "RL" not in judge(compared).headline  # it has none, however it did against another clone


def test_config_differences_between_runs(record: RunRecord) -> None:
    other = dataclasses.replace(record, config=record.config | {"batch_size": 32, "exp_name": "other"})
    assert config_differences([record, other]) == {"batch_size": [64, 32]}


# -- curves ------------------------------------------------------------------------------------------------


@given(st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(math.nan)), min_size=1, max_size=300), st.integers(1, 40))
def test_downsampling_keeps_means_and_extremes(values: list[float], limit: int) -> None:
    series = Series(np.arange(1, len(values) + 1) * 10, np.array(values))
    steps, mean, low, high = downsample(series, limit)
    assert len(steps) == min(limit, len(values)) == len(mean)
    assert (np.diff(steps) > 0).all() and steps[0] >= 10 and steps[-1] <= 10 * len(values)
    if low is None or high is None:
        np.testing.assert_array_equal(mean, values)
        return
    groups = np.array_split(np.arange(len(values)), np.linspace(0, len(values), limit + 1).astype(int)[1:-1])
    for i, group in enumerate(groups):
        finite = [values[j] for j in group if math.isfinite(values[j])]
        if not finite:
            assert math.isnan(mean[i]) and math.isnan(low[i]) and math.isnan(high[i])
        else:
            assert mean[i] == pytest.approx(np.mean(finite), rel=1e-9, abs=1e-6)
            assert (low[i], high[i]) == (min(finite), max(finite))


def test_every_metric_is_somewhere(record: RunRecord) -> None:
    strange = Series(np.array([1, 2]), np.array([1.0, math.nan]))
    curves = create_curves([dataclasses.replace(record, series=record.series | {"new_metric": strange})])
    charts = {chart["title"]: chart for group in curves["groups"] for chart in group["charts"]}
    assert charts["new_metric"]["lines"][0]["y"] == [1.0, None]
    assert [line["name"] for line in charts["Q and its target"]["lines"]] == ["q_mean", "target_q_mean"]
    assert curves["constants"]["alpha_value"] == 1.0 and "Temperature" not in charts
    success = charts["Success rate"]["lines"][0]
    low = record.series["eval/success_rate_low"].values
    assert success["low"] == pytest.approx(low.tolist(), rel=1e-4) and len(success["high"]) == len(low)
    json.dumps(curves, allow_nan=False)


def test_runs_share_the_points(record: RunRecord) -> None:
    many = Series(np.arange(5000), np.random.default_rng(0).normal(size=5000))
    long = dataclasses.replace(record, series={"total_loss": many})
    for count, points in ((1, 1000), (2, 500), (8, 250)):
        lines = create_curves([long] * count)["groups"][0]["charts"][0]["lines"]
        assert [len(line["y"]) for line in lines] == [points] * count


def test_numbers_of_a_baseline_run(tmp_path: Path) -> None:
    """A run's baselines are runs of their own, and count before the run has a summary."""
    run = make_run(tmp_path / "under-way", finished=False)
    record = read_run(run)
    assert list(record.stages) == ["bc", "bc_success_only", "offline_continued"]
    assert any("Imitation reached 44 %; whether RL beats it is judged at the end" in s for s in judge(record).sentences)
    baseline = run / "baselines" / "bc"
    (baseline / "config.yaml").write_text((run / "config.yaml").read_text())
    (baseline / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text())
    assert read_run(baseline).name == "quickstart/under-way/bc"
