"""How trouble becomes episodes: hysteresis, phases, restarts."""

import dataclasses
import json
import pathlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from monitoring_helpers import state_config

from acrlpd.models.families.gaussian import GaussianPolicyConfig
from acrlpd.monitoring.anomalies import AnomalyDetector, suggest_lr_adjustment

CONFIG = state_config(pathlib.Path("unused"))
HEALTHY = {"q_std": 1.0, "q_mean": 0.5, "q_ensemble_std": 0.1, "candidate_diversity": 0.5, "reward_max": 1.0}


def line(step: int, **changes: Any) -> dict[str, Any]:
    return {"step": step, "phase": "offline", **HEALTHY, **changes}


def detector(directory: pathlib.Path, name: str = "anomalies.jsonl") -> AnomalyDetector:
    return AnomalyDetector(CONFIG, directory / name)


def entries(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def test_trouble_that_comes_and_goes_is_one_episode(tmp_path: pathlib.Path) -> None:
    """Between the threshold and its half nothing changes, nor in a few healthy lines."""
    watch = detector(tmp_path)
    spreads = [0.5, 1e-4, 1e-4, 1e-4, 1.5e-3, 0.5, 0.5, 1e-4, 1.5e-3, 1e-4, *[0.5] * 4, 1.5e-3, *[0.5] * 5, 0.5]
    shown = [bool(watch.check(line(i, candidate_diversity=spread))) for i, spread in enumerate(spreads)]
    assert shown == [False] * 3 + [True] * 16 + [False] * 2
    found = entries(tmp_path / "anomalies.jsonl")
    assert [(entry["step"], entry["last_step"]) for entry in found] == [(3, None), (3, 9)]


def test_a_new_phase_is_judged_by_itself(tmp_path: pathlib.Path) -> None:
    """Losses of another size are normal when the data changes; an explosion within the phase is not."""
    watch = detector(tmp_path)
    for step in range(20):
        assert not watch.check(line(step, critic_loss=0.01))
    for step in range(20, 40):
        assert not watch.check(line(step, critic_loss=1.0, phase="online"))
    for step in range(40, 42):
        watch.check(line(step, critic_loss=50.0, phase="online"))
    assert set(watch.open) == {"loss_explosion"}


def test_a_loss_that_changed_for_good_is_believed_in_the_end(tmp_path: pathlib.Path) -> None:
    watch = detector(tmp_path)
    for step in range(20):
        watch.check(line(step, bc_loss=0.1))
    for step in range(20, 220):
        watch.check(line(step, bc_loss=2.0))
    found = entries(tmp_path / "anomalies.jsonl")
    assert [entry["step"] for entry in found] == [21, 21]
    assert 30 < found[1]["last_step"] < 40  # in the end, not at once


@pytest.mark.parametrize(
    ("rewards", "q", "is_trouble"),
    [
        ((0.0, 1.0), 99.0, False),
        ((0.0, 1.0), 106.0, True),
        ((0.0, 1.0), -6.0, True),
        ((-1.0, 0.0), -99.0, False),
        ((-1.0, 0.0), 6.0, True),
        ((0.0, 0.0), 110.0, True),  # nothing is known of rewards, but this is a lot
    ],
)
def test_the_bound_of_q(rewards: tuple[float, float], q: float, is_trouble: bool, tmp_path: pathlib.Path) -> None:
    """Discount 0.99: values lie between 100 times the smallest and the largest reward, and 0."""
    watch = AnomalyDetector(state_config(tmp_path, acrlpd__discount=0.99), None)
    for step in range(2):
        watch.check(line(step, q_mean=q, q_std=10.0, reward_min=rewards[0], reward_max=rewards[1]))
    assert ("q_divergence" in watch.open) == is_trouble


def test_a_line_without_numbers_changes_nothing(tmp_path: pathlib.Path) -> None:
    watch = detector(tmp_path)
    for step in range(30):
        assert not watch.check({"step": step, "phase": "offline", "q_std": None, "critic_loss": None})


def test_an_end_that_comes_after_the_checkpoint_is_reported_once(tmp_path: pathlib.Path) -> None:
    """Its entry names the step at which the trouble began, which the checkpoint has seen."""
    watch = detector(tmp_path)
    for step in range(1, 5):
        watch.check(line(step, candidate_diversity=1e-4))
    state = json.loads(json.dumps(watch.state_dict()))
    for resumed in (watch, detector(tmp_path)):
        resumed.load_state_dict(state, 4)
        for step in range(5, 11):
            resumed.check(line(step))
    assert [(entry["step"], entry["last_step"]) for entry in entries(tmp_path / "anomalies.jsonl")] == [
        (3, None),
        (3, 4),
    ]


@pytest.mark.parametrize(
    ("kind", "is_trouble"),
    [("awr", True), *((kind, False) for kind in ("policy_gradient", "distillation", "sac", "expo", "dsrl"))],
)
def test_minus_a_value_is_no_loss_that_explodes(kind: str, is_trouble: bool, tmp_path: pathlib.Path) -> None:
    watch = AnomalyDetector(state_config(tmp_path, improvement=kind), None)
    for step in range(20):
        watch.check(line(step, actor_loss=0.1 if step < 10 else 5.0))
    assert ("loss_explosion" in watch.open) == is_trouble


def test_without_weight_the_cloning_loss_may_grow() -> None:
    """RLPD leaves the data behind."""
    for weight, is_trouble in ((0.01, True), (0.0, False)):
        watch = AnomalyDetector(CONFIG, None)
        for step in range(20):
            watch.check(line(step, bc_weight=weight, bc_loss=0.1 if step < 10 else 50.0))
        assert ("loss_explosion" in watch.open) == is_trouble


@pytest.mark.parametrize(("kind", "is_trouble"), [("awr", True), ("distillation", False)])
def test_minus_a_value_outweighs_no_cloning_loss(kind: str, is_trouble: bool, tmp_path: pathlib.Path) -> None:
    watch = AnomalyDetector(state_config(tmp_path, improvement=kind), None)
    for step in range(20):
        watch.check(line(step, bc_weight=1.0, bc_loss=0.1, actor_loss=1e4))
    assert ("bc_rl_imbalance" in watch.open) == is_trouble


@pytest.mark.parametrize("losses", [(-20.0, -19.0), (-20.0, 1.0), (30.0, 0.01)])
def test_minus_the_logarithm_of_a_density_outweighs_nothing(
    losses: tuple[float, float], tmp_path: pathlib.Path
) -> None:
    """The cloning losses of the gaussian policy fall below 0, and their sizes say nothing."""
    config = dataclasses.replace(state_config(tmp_path), model=GaussianPolicyConfig())
    watch = AnomalyDetector(config, None)
    for step in range(20):
        watch.check(line(step, bc_weight=1.0, bc_loss=losses[0], actor_loss=losses[1]))
    assert not watch.open


@pytest.mark.parametrize(
    ("kind", "harmless", "trouble"),
    [
        ("data_starvation", {"timing/data_wait_s": 0.2}, {"timing/data_wait_s": 0.3}),
        # As large as Q differs over the batch, unless Q is nearly the same everywhere.
        ("ensemble_disagreement", {"q_ensemble_std": 0.9}, {"q_ensemble_std": 1.1}),
        ("ensemble_disagreement", {"q_ensemble_std": 0.9, "q_std": 0.1, "q_mean": 10.0}, {"q_ensemble_std": 1.1}),
        ("ensemble_disagreement", {"q_ensemble_std": 0.04, "q_std": 1e-3, "q_mean": 0.0}, {"q_ensemble_std": 0.06}),
        ("dead_candidates", {"candidate_diversity": 1.1e-3}, {"candidate_diversity": 0.9e-3}),
        ("q_collapse", {"q_std": 0.011}, {"q_std": 0.009}),
    ],
)
def test_where_trouble_begins(kind: str, harmless: dict[str, float], trouble: dict[str, float]) -> None:
    watch = AnomalyDetector(CONFIG, None)
    changes = {"timing/step_s": 0.8, "timing/data_wait_s": 0.0} | harmless
    if "timing/data_wait_s" in trouble:
        changes["timing/step_s"] = trouble["timing/step_s"] = 0.75
    for step in range(15):
        watch.check(line(step, **changes))
    assert kind not in watch.open
    for step in range(15, 20):
        watch.check(line(step, **(changes | trouble)))
    assert kind in watch.open


@pytest.mark.parametrize(("of_policy", "is_trouble"), [({"actor_loss": 0.1}, False), ({}, True)])
def test_updates_that_begin_to_train_the_policy_may_take_longer(of_policy: dict[str, float], is_trouble: bool) -> None:
    """In their warm-up the critics learn alone."""
    watch = AnomalyDetector(CONFIG, None)
    for step in range(30):
        begun = step >= 10
        times = {"timing/step_s": 0.4 if begun else 0.1, "timing/data_wait_s": 0.0}
        watch.check(line(step, **times, **(of_policy if begun else {})))
    assert ("throughput_drop" in watch.open) == is_trouble


number = st.one_of(st.none(), st.floats(1e-6, 1e6))
lines = st.lists(
    st.fixed_dictionaries(
        {"critic_loss": number, "q_std": number, "candidate_diversity": number, "timing/step_s": number},
        optional={"update_skipped": st.sampled_from([0.0, 0.5]), "timing/data_wait_s": st.floats(0, 1)},
    ),
    max_size=40,
)


@settings(max_examples=200)
@given(lines, st.integers(0, 40), st.integers(0, 40))
def test_an_interrupted_watch_is_the_watch(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[dict[str, Any]], saved: int, killed: int
) -> None:
    """Killed some lines after a checkpoint and resumed from it, it reports what it would have reported."""
    directory = tmp_path_factory.mktemp("anomalies")
    saved = min(saved, len(numbers))
    straight = detector(directory, "straight.jsonl")
    expected = [straight.check(line(i, **changes)) for i, changes in enumerate(numbers, start=1)]
    interrupted = detector(directory, "interrupted.jsonl")
    found = [interrupted.check(line(i, **changes)) for i, changes in enumerate(numbers[:saved], start=1)]
    state = json.loads(json.dumps(interrupted.state_dict()))
    for i, changes in enumerate(numbers[saved:killed], start=saved + 1):
        interrupted.check(line(i, **changes))
    resumed = detector(directory, "interrupted.jsonl")
    resumed.load_state_dict(state, saved)
    found += [resumed.check(line(i, **changes)) for i, changes in enumerate(numbers[saved:], start=saved + 1)]
    assert found == expected
    assert entries(directory / "interrupted.jsonl") == entries(directory / "straight.jsonl")


def test_a_cut_off_line_does_not_spoil_what_follows(tmp_path: pathlib.Path) -> None:
    """A machine went down while it wrote: not the next resume, but the one after it would read both lines as one."""
    path = tmp_path / "anomalies.jsonl"
    dead = [line(step, candidate_diversity=1e-4) for step in range(1, 6)]
    watch = detector(tmp_path)
    for metrics in dead:
        watch.check(metrics)
    [first] = entries(path)
    path.write_text(json.dumps(first) + "\n" + json.dumps(first)[:30])
    for resumed_at in (5, 15):
        watch = detector(tmp_path)
        watch.load_state_dict(None, resumed_at)
        for metrics in dead:
            watch.check({**metrics, "step": metrics["step"] + resumed_at})
    assert [entry["step"] for entry in entries(path)] == [first["step"] + start for start in (0, 5, 15)]


def test_suggested_learning_rates(tmp_path: pathlib.Path) -> None:
    config = state_config(tmp_path, critic_lr_schedule__peak_lr=1e-3)
    assert "--critic_lr 0.0005" in suggest_lr_adjustment(config, "critic", {"critic_grad_norm": 2.0})
    assert "clipped" in suggest_lr_adjustment(config, "critic", {"critic_grad_norm": 50.0})
    assert "--pi0_lr" in suggest_lr_adjustment(config, "policy", {"policy_grad_norm": None})


@pytest.mark.parametrize("name", ["improvement", "backup"])
def test_networks_that_learn_with_the_critics_are_named_as_culprits(name: str, tmp_path: pathlib.Path) -> None:
    watch = detector(tmp_path)
    watch.check(line(1, update_skipped=0.5, policy_grad_norm=1.0, critic_grad_norm=1.0, **{f"{name}_grad_norm": None}))
    [entry] = entries(tmp_path / "anomalies.jsonl")
    assert f"(of: {name})" in entry["message"] and "--critic_lr" in entry["advice"]


def test_a_full_disk_does_not_stop_the_watch(tmp_path: pathlib.Path) -> None:
    (tmp_path / "anomalies.jsonl").symlink_to("/dev/full")
    watch = detector(tmp_path)
    for step in range(5):
        watch.check(line(step, candidate_diversity=0.0))
    assert set(watch.open) == {"dead_candidates"}
