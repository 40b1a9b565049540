"""Studies from their start to the report: stages, pruning, trials that go wrong, and the final comparison."""

import json
import re
import statistics

import pytest
from fake_trial import CRASHES, DIVERGES, INTERRUPTS, IS_KILLED, IS_KILLED_ONCE, IS_NEVER_JUDGED
from study_helpers import is_alive, make_space, run, tuned_config

from acrlpd.config import ConfigError, apply_config_overrides, config_hash, get_config, load_config, validate_config
from acrlpd.tuning.objective import choose_objective
from acrlpd.tuning.space import read_value
from acrlpd.tuning.study_files import StudySettings, claim, share_trials, split_evenly, study_directory
from acrlpd.tuning.trial import shorten


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A whole study of two stages with pruning and a final comparison."""
    return run(tmp_path_factory.mktemp("study"), trials=8, evaluations=2, final_seeds=3, jobs=2)


def test_the_config_itself_is_the_first_trial_and_each_stage_keeps_the_best_of_the_stage_before(study):
    first, second = study.stages
    control, other = first.records
    assert control.is_control and control.outcome == "finished" and control.values == {"critic.num_critics": 2}
    # There is one other choice. The same values with the same seeds give the same result, so no trial is made twice.
    assert other.values == {"critic.num_critics": 4} and other.score > control.score
    assert len(second.records) == 4
    assert {record.values["critic.num_critics"] for record in second.records} == {4}
    assert len({record.values["pi0_lr"] for record in second.records}) == 4
    assert study.best.score == max(record.score for record in study.records)


def test_the_winner_is_judged_on_seeds_and_episodes_that_no_trial_had(study):
    assert study.final is not None and study.final.seeds == (2, 3, 4)
    assert statistics.mean(study.final.gains) == pytest.approx(study.best.score - study.control.score)
    assert "the config was improved" in study.verdict
    sides = [load_config(path) for path in (study.directory / "final").glob("*/config.yaml")]
    assert {side.evaluation.seed for side in sides} == {study.config.evaluation.seed + 1_000_000}


def test_only_the_best_trial_keeps_its_checkpoints(study):
    kept = {path.parents[2].name for path in (study.directory / "trials").glob("*/debug/trial-seed*/20")}
    assert kept == {f"{study.best.stage}-{study.best.number}"}
    assert not list((study.directory / "final").glob("*/debug/trial-seed*/20"))


def test_the_report_has_the_control_the_intervals_and_what_mattered(study):
    report = (study.directory / "report.md").read_text()
    assert re.search(r"\| critics 0 \(the config itself\) \| [\d.]+ % \| [\d.]+ %, [\d.]+ % \| \d+ to \d+ %", report)
    assert "seed 2 | seed 3 | seed 4" in report and study.verdict in report
    assert "`critic.num_critics`" in report and "rank correlation" in report
    for record in study.records:
        assert f"| {record.label} | {record.outcome}" in report


def test_the_best_config_keeps_everything_that_was_not_searched(study):
    best = load_config(study.directory / "best.yaml")
    own = {key: read_value(study.config, key) for key in study.best.values}
    assert {key: read_value(best, key) for key in own} == study.best.values
    own["actor_lr_schedule.decay_lr"] = study.config.actor_lr_schedule.decay_lr
    assert config_hash(apply_config_overrides(best, own)) == config_hash(study.config)


def test_a_study_that_is_finished_is_reported_again_and_goes_on_with_more_trials(study):
    again = run(study.directory.parents[1], trials=8, evaluations=2, final_seeds=3)
    assert again.records == study.records and again.final == study.final
    (study.directory / "slow").touch()  # the next trial is below the median at its first evaluation, and waits there
    more = run(study.directory.parents[1], trials=9, evaluations=2)
    assert more.records[:-1] == study.records
    hopeless = more.records[-1]
    assert (hopeless.stage, hopeless.outcome, hopeless.score, hopeless.scores) == ("rates", "pruned", None, (0, 0))
    assert f"{hopeless.label} | pruned" in (study.directory / "report.md").read_text()


def test_trials_that_go_wrong_are_recorded_and_the_study_goes_on(tmp_path):
    kinds = [8, DIVERGES, CRASHES, IS_KILLED, IS_KILLED_ONCE, IS_NEVER_JUDGED]
    result = run(tmp_path, text=f"batch_size: {kinds}", trials=20, jobs=1)
    ended = {r.values["batch_size"]: r for r in result.records if r.outcome != "repeated"}
    assert {kind: record.outcome for kind, record in ended.items()} == {
        8: "finished",
        DIVERGES: "diverged",
        CRASHES: "failed",
        IS_KILLED: "failed",
        IS_KILLED_ONCE: "finished",  # the second time
        IS_NEVER_JUDGED: "failed",
    }
    assert ended[CRASHES].reason == "exit code 2: this trial cannot be made"
    assert "killed by SIGKILL" in ended[IS_KILLED].reason
    assert "no evaluation has the metric eval/success_rate" in ended[IS_NEVER_JUDGED].reason
    repeated = [record for record in result.records if record.outcome == "repeated"]
    assert sorted(record.values["batch_size"] for record in repeated) == [IS_KILLED, IS_KILLED_ONCE]
    assert not any((result.directory / "trials" / f"all-{record.number}").exists() for record in repeated)
    report = (result.directory / "report.md").read_text()
    assert "this trial cannot be made" in report and "| diverged |" in report


def test_an_interrupt_ends_the_trials_and_the_study_can_go_on(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, batch_size=INTERRUPTS)
    study = tmp_path / "debug/default-tune"
    assert not is_alive(int((study / "waits").read_text()))
    (study / "go").touch()
    assert run(tmp_path, batch_size=INTERRUPTS, trials=4).control.number == 1


def test_a_config_that_cannot_be_trained_ends_the_study_at_once(tmp_path):
    with pytest.raises(ConfigError, match=r"trial 0, cannot be trained: exit code 2: this trial cannot be made"):
        run(tmp_path, batch_size=CRASHES)
    assert len(list((tmp_path / "debug/default-tune/trials").iterdir())) == 1


def test_a_plateau_is_called_a_plateau(tmp_path):
    """The config has the best values already."""
    text = "critic.num_critics: [4, 8]\nactor_lr_schedule.warmup_steps: [1, 2]\n"
    best = {"actor_lr_schedule.peak_lr": 1e-3, "critic.num_critics": 4, "actor_lr_schedule.warmup_steps": 1}
    result = run(tmp_path, text=text, trials=4, final_seeds=2, **best)
    assert result.best.is_control and result.final is None
    assert "at a plateau" in result.verdict and "at a plateau" in (result.directory / "report.md").read_text()


def test_a_directory_of_another_study_is_refused_and_stays_as_it_was(tmp_path):
    config = tuned_config(tmp_path)
    settings = StudySettings((0, 1), 20, 1, (4, 4))
    directory = study_directory(config)
    directory.mkdir(parents=True)
    claim(directory, config, make_space(config), settings)
    before = {path: path.read_bytes() for path in directory.iterdir()}
    other = tuned_config(tmp_path, batch_size=16)
    with pytest.raises(ConfigError, match=r"another config:\n  batch_size: 8 -> 16\n.*another --exp_name"):
        claim(directory, other, make_space(other), settings)
    with pytest.raises(ConfigError, match=r"another space:\n  - .*\n"):
        claim(directory, config, make_space(config, "critic.num_critics: [2, 8]\n"), settings)
    with pytest.raises(ConfigError, match=r"--seeds \(0, 1\); found \(0,\)"):
        claim(directory, config, make_space(config), StudySettings((0,), 20, 1, (4, 4)))
    assert claim(directory, config, make_space(config), StudySettings((0, 1), 20, 1, (9, 9))) == settings
    assert {path: path.read_bytes() for path in directory.iterdir()} == before
    (directory / "study.json").write_text(json.dumps({"seeds": 1}))
    with pytest.raises(ConfigError, match=r"study\.json is damaged"):
        claim(directory, config, make_space(config), settings)


def test_trials_are_split_evenly_and_later_changes_are_those_of_the_last_stage():
    assert split_evenly(40, 3) == (14, 13, 13)
    assert share_trials(40, (14, 13, 13)) == (14, 13, 13)
    assert share_trials(50, (14, 13, 13)) == (14, 13, 23)
    assert share_trials(20, (14, 13, 13)) == (14, 6, 0)


def test_nobody_but_the_tuner_is_told_about_a_trial():
    alerts = {"logging.wandb": "offline", "logging.alerts.wandb": True, "logging.alerts.command": ("true",)}
    shortened = shorten(apply_config_overrides(get_config("debug"), alerts), 10, evaluations=2)
    assert not shortened.logging.alerts.has_receiver and shortened.logging.wandb == "disabled"
    assert validate_config(shortened).errors == validate_config(get_config("debug")).errors


def test_the_objective_is_success_or_else_the_error_on_held_out_episodes():
    debug = get_config("debug")
    assert choose_objective(get_config("quickstart")).metric == "eval/success_rate"
    assert choose_objective(debug).metric == "validation/relative_best_of_n_error"
    cloning = {"acrlpd.loss_weights.critic_weight": 0.0, "acrlpd.loss_weights.actor_weight": 0.0}
    assert choose_objective(apply_config_overrides(debug, cloning)).metric == "validation/relative_action_error"
    with pytest.raises(ConfigError, match=r"cannot be judged: .*env\.id.*validation_share"):
        choose_objective(apply_config_overrides(debug, {"data.validation_share": 0.0}))
