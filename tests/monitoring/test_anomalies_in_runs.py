"""Every kind of trouble, provoked in a real run: three runs that go wrong in different ways."""

import pathlib

import jax.numpy as jnp
import pytest
from monitoring_helpers import UPDATE_S, DrivenTime, Run, state_config, train, with_rewards

from acrlpd.agents import networks
from acrlpd.batch import Batch
from acrlpd.models.policy import draw_noise
from acrlpd.monitoring.anomaly_kinds import KINDS
from acrlpd.monitoring.run_monitor import MEMORY
from acrlpd.runs.metrics_log import TIMING

NAN_STEPS, OUTLIER_STEPS, SLOW_STEPS = range(41, 45), range(61, 67), range(81, 101)
LAST_STEP = 112
TIMING_KINDS = {"data_starvation", "throughput_drop"}


@pytest.fixture(scope="module")
def faulty_data(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A healthy run whose data goes wrong three times: NaN rewards, huge rewards, a slow disk."""
    directory = tmp_path_factory.mktemp("faulty_data")
    # Critics agree sooner from small initial weights: with a line for each update, their first disagreement would show.
    calm = {"critic_lr_schedule__peak_lr": 3e-3, "critic__kernel_init_scale": 0.5}
    config = state_config(directory, offline_steps=LAST_STEP, **calm)
    time = DrivenTime()

    def faults(step: int, batch: Batch) -> Batch:
        if step in NAN_STEPS:
            return with_rewards(batch, float("nan"))
        if step in OUTLIER_STEPS:
            return with_rewards(batch, 100.0)
        if step in SLOW_STEPS:
            time.advance(10 * UPDATE_S)
        return batch

    return train(config, directory / "run", fault=faults, time=time)


@pytest.fixture(scope="module")
def wrong_settings(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A temperature that learns too fast, cloning that drowns the actor, critics that decay to nothing."""
    directory = tmp_path_factory.mktemp("wrong_settings")
    config = state_config(
        directory,
        offline_steps=25,
        temperature_lr_schedule__peak_lr=1.0,
        acrlpd__loss_weights__bc_weight=1000.0,
        critic_lr_schedule__peak_lr=1e-2,
        critic_optimizer__weight_decay=50.0,
    )
    return train(config, directory / "run")


@pytest.fixture(scope="module")
def untrained_critics(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Critics that start far off and hardly learn, and a sampler that gives all candidates the same noise."""
    directory = tmp_path_factory.mktemp("untrained_critics")
    config = state_config(
        directory,
        offline_steps=20,
        critic_lr_schedule__peak_lr=1e-9,
        critic__kernel_init_scale=1e6,
        acrlpd__discount=0.5,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            networks,
            "draw_noise",
            lambda rng, shape: jnp.broadcast_to(draw_noise(rng, (shape[0], 1, *shape[2:])), shape),
        )
        return train(config, directory / "run")


def lasting(run: Run, kind: str) -> list[int]:
    """Steps whose line of metrics shows this kind."""
    metric = f"timing/anomaly/{kind}" if kind in TIMING_KINDS else f"anomaly/{kind}"
    return [line["step"] for line in run.lines if line.get(metric) == 1.0]


def test_a_healthy_run_is_left_alone(faulty_data: Run) -> None:
    assert not [entry for entry in faulty_data.anomalies if entry["step"] < NAN_STEPS[0]]


def test_non_finite_updates(faulty_data: Run) -> None:
    reported = faulty_data.first("non_finite_updates")
    assert (reported["step"], reported["severity"]) == (NAN_STEPS[0], "error")
    assert "100% of the updates" in reported["message"] and "critic" in reported["message"]
    assert "data inspect" in reported["advice"] and "--critic_lr 0.0015" in reported["advice"]
    last = [entry for entry in faulty_data.anomalies if entry["kind"] == "non_finite_updates"][-1]
    assert (last["step"], last["last_step"]) == (NAN_STEPS[0], NAN_STEPS[-1])
    # It is over once there were five healthy lines.
    assert lasting(faulty_data, "non_finite_updates") == list(range(NAN_STEPS[0], NAN_STEPS[-1] + 5))


def test_loss_explosion(faulty_data: Run) -> None:
    reported = faulty_data.first("loss_explosion")
    assert (reported["step"], reported["severity"]) == (OUTLIER_STEPS[1], "error")
    loss = next(line["critic_loss"] for line in faulty_data.lines if line["step"] == OUTLIER_STEPS[1])
    assert f"critic_loss is {loss:.4g}" in reported["message"]
    assert "huber" in reported["advice"]
    assert faulty_data.episodes("loss_explosion") == {OUTLIER_STEPS[1]}


@pytest.mark.parametrize("kind", sorted(TIMING_KINDS))
def test_slow_data(faulty_data: Run, kind: str) -> None:
    """Both the wait and the slowdown are reported once, while the disk is slow, and end with it."""
    begun, ended = (entry for entry in faulty_data.anomalies if entry["kind"] == kind)
    assert begun["severity"] == "warning" and begun["last_step"] is None
    # A batch is taken up to two updates before the line of its step, and three lines make an anomaly.
    assert begun["step"] in SLOW_STEPS[:3]
    assert ended["step"] == begun["step"] and ended["last_step"] - begun["step"] == len(SLOW_STEPS) - 3
    assert lasting(faulty_data, kind) == list(range(begun["step"], ended["last_step"] + 5))
    assert {"data_starvation": "91%", "throughput_drop": "takes 110 ms"}[kind] in begun["message"]


def test_equal_runs_write_equal_metrics_apart_from_what_is_measured(tmp_path: pathlib.Path) -> None:
    """One of two equal runs has a slow disk: only metrics under timing/ may tell."""
    config, time = state_config(tmp_path, offline_steps=30, critic_lr_schedule__peak_lr=3e-3), DrivenTime()

    def slow(step: int, batch: Batch) -> Batch:
        time.advance(10 * UPDATE_S if step in range(15, 25) else 0.0)
        return batch

    runs = [train(config, tmp_path / "slow", fault=slow, time=time), train(config, tmp_path / "fast")]
    assert [len(run.episodes("data_starvation")) for run in runs] == [1, 0]
    computed = [
        [{name: value for name, value in line.items() if not name.startswith((TIMING, MEMORY))} for line in run.lines]
        for run in runs
    ]
    assert computed[0] == computed[1] and len(computed[0]) == 30


def test_temperature_out_of_range(wrong_settings: Run) -> None:
    reported = wrong_settings.first("temperature_out_of_range")
    assert "times the spread of the candidates' values; expected 0.01 to 100 times" in reported["message"]
    assert "--temperature_lr_schedule.peak_lr 0.5" in reported["advice"]
    line = next(line for line in wrong_settings.lines if line["step"] == reported["step"])
    assert not 0.01 < line["alpha_value"] / line["candidate_q_std"] < 100


def test_bc_rl_imbalance(wrong_settings: Run) -> None:
    reported = wrong_settings.first("bc_rl_imbalance")
    assert reported["step"] == 3
    assert "1000 * " in reported["message"]
    assert "lower bc_weight" in reported["advice"]


def test_q_collapse(wrong_settings: Run) -> None:
    reported = wrong_settings.first("q_collapse")
    assert reported["step"] == 13  # ten lines of grace, then three
    assert "everywhere" in reported["message"] and "rewards reach 1" in reported["message"]
    assert "weight decay" in reported["advice"]


def test_q_divergence(untrained_critics: Run) -> None:
    reported = untrained_critics.first("q_divergence")
    assert (reported["step"], reported["severity"]) == (2, "error")
    assert "rewards from 0 to 1 and discount 0.5 allow 0 to 2" in reported["message"]


def test_ensemble_disagreement(untrained_critics: Run) -> None:
    reported = untrained_critics.first("ensemble_disagreement")
    assert reported["step"] == 13
    assert "critic_warmup_steps" in reported["advice"]


def test_dead_candidates(untrained_critics: Run) -> None:
    reported = untrained_critics.first("dead_candidates")
    assert reported["step"] == 3
    assert "candidates of an observation are equal" in reported["message"]


def test_all_kinds_were_provoked(faulty_data: Run, wrong_settings: Run, untrained_critics: Run) -> None:
    seen = {e["kind"] for run in (faulty_data, wrong_settings, untrained_critics) for e in run.anomalies}
    assert seen == {kind.name for kind in KINDS}


def test_trouble_that_lasts_is_reported_once(wrong_settings: Run, untrained_critics: Run) -> None:
    for run, kind in ((wrong_settings, "q_collapse"), (untrained_critics, "q_divergence")):
        entries = [entry for entry in run.anomalies if entry["kind"] == kind]
        assert [entry["last_step"] for entry in entries] == [None]
        assert lasting(run, kind) == list(range(entries[0]["step"], run.lines[-1]["step"] + 1))


def test_what_a_line_of_the_file_holds(faulty_data: Run, directory_of_docs: pathlib.Path) -> None:
    for entry in faulty_data.anomalies:
        assert set(entry) == {"kind", "step", "last_step", "severity", "message", "advice"}
    guide = (directory_of_docs / "troubleshooting.md").read_text()
    assert all(f"`{kind.name}`" in guide for kind in KINDS)
