"""What the report says of held-out episodes: over-fitting, a blind policy, or critics that do not rank."""

import re
from pathlib import Path
from typing import Any

import pytest
from run_factory import add_validations, make_run
from test_report_browser import BROWSER, open_page

from acrlpd.monitoring.report import generate_training_report
from acrlpd.monitoring.report_training import analyze_training
from acrlpd.monitoring.report_verdict import Verdict, judge
from acrlpd.runs.record import read_run

FALLING = {500: 0.5, 1000: 0.4, 1500: 0.38}
RISING = {500: 0.5, 1000: 0.4, 1500: 0.44}


def robot_run(directory: Path, losses: dict[int, float] | None, **numbers: Any) -> Path:
    """A run without an environment: no success rate anywhere."""
    run = make_run(directory, online_steps=0, rates={}, stages={}, anomalies=False, **{"env.id": None})
    if losses is not None:
        add_validations(run, losses, **numbers)
    return run


def verdict(tmp_path: Path, losses: dict[int, float] | None, **numbers: Any) -> Verdict:
    return judge(read_run(robot_run(tmp_path / "run", losses, **numbers)))


def test_a_run_that_generalises(tmp_path: Path) -> None:
    found = verdict(tmp_path, FALLING)
    assert found.tone == "none"
    assert found.headline == "Held-out episodes: action error 40 % of the mean action's, at step 1,500"
    text = " ".join(found.sentences)
    assert "the policy uses what it sees" in text and "rank correlation 0.70" in text and "0.90 (chance: 0.50)" in text


@pytest.mark.parametrize(
    ("losses", "numbers", "tone", "sentence"),
    [
        (RISING, {}, "bad", r"Over-fitting: .* lowest at step 1,000 \(0\.4\) and has risen to 0\.44, while the loss"),
        (FALLING, {"ratio": 0.97}, "bad", "A blind policy: its error on held-out episodes is 97 % of that of the mean"),
        (FALLING, {"ranks": 0.02, "auc": 0.5}, "unclear", r"Critics that do not rank: rank correlation .* 0\.02"),
        (FALLING, {"ranks": -0.5, "auc": None}, "unclear", "Critics that do not rank"),
    ],
)
def test_trouble_is_named_with_its_numbers(
    tmp_path: Path, losses: dict[int, float], numbers: dict[str, Any], tone: str, sentence: str
) -> None:
    found = verdict(tmp_path, losses, **numbers)
    assert found.tone == tone and re.search(sentence, found.sentences[0])


def test_the_loss_of_labelled_prompts_takes_the_place_of_cloning(tmp_path: Path) -> None:
    run = robot_run(tmp_path / "run", RISING)
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"bc_loss"', '"actor_loss"'))
    assert "Over-fitting" in judge(read_run(run)).sentences[0]


@pytest.mark.parametrize(("ratio", "tone", "sees"), [(0.92, "none", "the policy sees"), (0.97, "bad", "hardly better")])
def test_the_verdict_and_the_analysis_agree_on_what_the_policy_sees(
    tmp_path: Path, ratio: float, tone: str, sees: str
) -> None:
    record = read_run(robot_run(tmp_path / "run", FALLING, ratio=ratio))
    assert judge(record).tone == tone
    assert sees in analyze_training(record)["Policy"]["Samples"]


def test_critics_that_rank_by_one_of_both_measures_are_not_accused(tmp_path: Path) -> None:
    assert verdict(tmp_path, FALLING, ranks=0.0, auc=0.9).tone == "none"


@pytest.mark.parametrize(("ranks", "words"), [(0.7, "Q at logged chunks ranks as"), (0.23, "weakly ranks as")])
def test_the_words_follow_the_correlation(tmp_path: Path, ranks: float, words: str) -> None:
    assert words in " ".join(verdict(tmp_path, FALLING, ranks=ranks).sentences)


@pytest.mark.parametrize(("ranks", "auc"), [(0.7, 0.9), (-0.5, 0.3)])
def test_critics_are_not_judged_by_one_episode(tmp_path: Path, ranks: float, auc: float) -> None:
    found = verdict(tmp_path, FALLING, ranks=ranks, auc=auc, episodes=1)
    text = " ".join(found.sentences)
    assert found.tone == "none" and "1 episode is held out, and at least 3 are needed" in text
    assert "rank correlation" not in text and "chance: 0.50" not in text


def test_the_advice_for_a_robot_is_to_hold_episodes_out(tmp_path: Path) -> None:
    [advice] = verdict(tmp_path, None).sentences
    assert "set data.validation_share" in advice and "acrlpd eval" not in advice


def test_a_share_that_holds_nothing_out_is_not_advised_again(tmp_path: Path) -> None:
    changes = {"env.id": None, "data.validation_share": 0.05}
    run = make_run(tmp_path / "run", online_steps=0, rates={}, stages={}, anomalies=False, **changes)
    [advice] = judge(read_run(run)).sentences
    assert "data.validation_share=0.05 holds no episode out" in advice and "fewer than ten episodes: 0.25" in advice


def test_trouble_is_also_told_to_runs_with_an_environment(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", anomalies=False)
    add_validations(run, RISING)
    found = judge(read_run(run))
    assert "RL beat imitation" in found.headline and any("Over-fitting" in sentence for sentence in found.sentences)


@pytest.mark.parametrize(("offline_steps", "planned"), [(1500, 1500), (1500, 2500), (0, 0)])
def test_a_loss_that_rises_online_is_no_over_fitting(tmp_path: Path, offline_steps: int, planned: int) -> None:
    """Also after an offline phase that ended early, and without an offline phase."""
    steps = {"offline_steps": offline_steps, "online_steps": 2500 - offline_steps, "training.offline_steps": planned}
    run = make_run(tmp_path / "run", anomalies=False, **steps)
    add_validations(run, FALLING | {2000: 0.9})
    assert not any("Over-fitting" in sentence for sentence in judge(read_run(run)).sentences)


def test_page_and_summary_have_the_numbers(tmp_path: Path) -> None:
    page = generate_training_report([robot_run(tmp_path / "run", RISING)])
    text, summary = page.read_text(), page.with_suffix(".md").read_text()
    for shown in (text, summary):
        assert "Over-fitting" in shown and "the best of 16 candidates is worth 0.125 more than their mean" in shown
    assert "128 windows of 4 episodes" in text and 'class="calibration"' in text
    assert "| 1 | 1.2 | 1.32 | 3 |" in summary
    if BROWSER is not None:
        document, console = open_page(page, tmp_path / "profile")
        charts = re.findall(r'aria-label="Chunks of held-out episodes".*?</svg>', document, re.DOTALL)
        assert console == "" and len(charts) == 2 and all(chart.count('class="line') == 3 for chart in charts)
        assert 'aria-label="Flow loss"' in document  # the losses differ, the other numbers are constant


@pytest.mark.parametrize(("ratio", "width", "limit"), [(0.4, "40.00%", None), (2.5, "100.00%", "40.00%")])
def test_bars_of_errors_go_beyond_the_mean_action(tmp_path: Path, ratio: float, width: str, limit: str | None) -> None:
    page = generate_training_report([robot_run(tmp_path / "run", FALLING, ratio=ratio)]).read_text()
    bars = re.findall(r'<div class="bar thin"><div class="fill c0" style="width:([\d.]+%)">', page)
    assert bars[:2] == [width, width]  # those of the two action dims; others follow
    assert re.findall(r'<div class="limit" style="left:([\d.]+%)"', page) == ([] if limit is None else [limit, limit])
