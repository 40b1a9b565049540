"""The protocol in an environment: same seeds for everybody, and everything written down."""

import dataclasses
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import av
import numpy as np
import pytest
from rollout_factory import make_rollout
from toy_agent import NORM_STATS, toy_agent, toy_config
from toy_env import seeded_chunks

from acrlpd.agents import Agent
from acrlpd.config import ACRLPDHyperparams, LossWeights, TrainingConfig
from acrlpd.console import Console
from acrlpd.envs import Chunks, EnvError
from acrlpd.envs.create import create_execution
from acrlpd.evaluation.protocol import EvaluationProtocol, write_film
from acrlpd.evaluation.report import print_evaluations
from acrlpd.execution.base import Columns
from acrlpd.execution.open_loop import OpenLoop
from acrlpd.policies.policy import Policy, create_policy


@pytest.fixture(scope="module")
def agent() -> Agent:
    return toy_agent(toy_config())


@pytest.fixture(scope="module")
def evaluator() -> Iterator[EvaluationProtocol]:
    with EvaluationProtocol(toy_config(), NORM_STATS, num_workers=0) as evaluator:
        yield evaluator


def protocol_of(env: str, **evaluation: int) -> EvaluationProtocol:
    base = toy_config()
    config = dataclasses.replace(
        base,
        env=dataclasses.replace(base.env, id=env, num_envs=2),
        evaluation=dataclasses.replace(base.evaluation, **evaluation),
    )
    return EvaluationProtocol(config, NORM_STATS, num_workers=0)


def test_the_same_seeds_and_the_same_numbers_every_time(evaluator: EvaluationProtocol, agent: Agent) -> None:
    first, again = evaluator.evaluate(evaluator.policy(agent)), evaluator.evaluate(evaluator.policy(agent))
    assert first == again
    assert [episode.seed for episode in first.episodes] == list(range(100, 106))
    other = evaluator.evaluate(evaluator.policy(toy_agent(toy_config(), seed=1)))
    assert [episode.seed for episode in other.episodes] == list(range(100, 106))
    assert other.episodes != first.episodes
    assert first.summary.successes == sum(episode.success for episode in first.episodes)
    assert first.tasks == {"go right": first.summary}


def test_another_seed_is_other_episodes_and_other_noise_of_the_policy() -> None:
    noise: dict[int, list[int]] = {}
    for seed in (0, 1):

        def policy(observations: Columns, prompts: Sequence[str], seeds: Sequence[int], seed: int = seed) -> Chunks:
            noise.setdefault(seed, []).extend(seeds)
            return seeded_chunks(observations, prompts, seeds)

        with protocol_of("toy", num_episodes=2, seed=seed) as evaluator:
            evaluator.play(policy)
    assert not set(noise[0]) & set(noise[1])


def test_robustness_covers_noise_and_candidates(evaluator: EvaluationProtocol, agent: Agent) -> None:
    evaluation = evaluator.evaluate(evaluator.policy(agent), robustness=True)
    assert {kind: list(levels) for kind, levels in evaluation.robustness.items()} == {
        "obs_noise": ["0.1"],
        "action_noise": ["0.1"],
        "best_of": ["1", "4"],
    }
    assert evaluation.robustness["best_of"]["4"] == evaluation.summary  # the agent's own number
    assert all(s.episodes == 6 for levels in evaluation.robustness.values() for s in levels.values())
    assert evaluation.metrics()["robustness/best_of_4"] == evaluation.summary.success_rate


def test_one_thing_is_disturbed_at_a_time(evaluator: EvaluationProtocol, agent: Agent) -> None:
    seen = set()

    class Watched(Policy):
        def __call__(self, observations: Columns, prompts: Sequence[str], seeds: Sequence[int]) -> Chunks:
            seen.add((self.observation_noise, self.action_noise, self.best_of_n))
            return super().__call__(observations, prompts, seeds)

    policy = evaluator.policy(agent)
    undisturbed = evaluator.evaluate(policy).summary
    evaluator.evaluate_robustness(Watched(**vars(policy)), {0: undisturbed})
    assert seen == {(0.1, 0.0, 4), (0.0, 0.1, 4), (0.0, 0.0, 1)}


def test_the_record_and_the_videos_are_written(agent: Agent, tmp_path: Path) -> None:
    base = toy_config()
    config = dataclasses.replace(base, evaluation=dataclasses.replace(base.evaluation, num_videos=2))
    with EvaluationProtocol(config, NORM_STATS, num_workers=0) as evaluator:
        metrics = evaluator.evaluate_at_step({0: agent}, 300, {0: tmp_path})[0]
    record = json.loads((tmp_path / "300" / "evaluation.json").read_text())
    assert record["success_rate"] == metrics["success_rate"]
    assert {"episodes", "interval", "success_rate", "tasks", "calibration", "per_episode"} <= set(record)
    assert len(record["videos"]) == 2 and len(record["per_episode"]) == 6
    for path, episode in zip(record["videos"], record["per_episode"], strict=False):
        with av.open(path) as container:
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert len(frames) == episode["length"] + 1 and frames[0].shape == (16, 24, 3)
        assert ("success" in path) == episode["success"]
    filmed = [trace for trace in record["traces"] if trace["film_strip"]]
    assert len(filmed) == 2 and len(record["traces"]) <= 4
    for trace in filmed:
        assert (tmp_path / "300" / trace["film_strip"]).is_file() and (tmp_path / "300" / trace["video"]).is_file()
    for trace in record["traces"]:
        values = trace["values"]
        assert len(trace["chunk_steps"]) == len(values["q"])
        assert all(
            low <= mean <= high and low <= q <= high + 1e-6
            for low, mean, q, high in zip(*(values[n] for n in ("q_min", "q_mean", "q", "q_max")), strict=True)
        )


def test_the_trainer_gets_robustness_at_every_fifth_evaluation(agent: Agent) -> None:
    base = toy_config(training=TrainingConfig(eval_frequency=10))
    changed = dataclasses.replace(base.evaluation, robustness=True, num_episodes=2, best_of_n_values=(1,))
    config = dataclasses.replace(base, evaluation=changed)
    with EvaluationProtocol(config, NORM_STATS, num_workers=0) as evaluator:
        results = {step: evaluator.evaluate_at_step({0: agent}, step, {})[0] for step in (40, 50, 60)}
    assert {step: "robustness/obs_noise_0.1" in metrics for step, metrics in results.items()} == {
        40: False,
        50: True,
        60: False,
    }
    assert {"success_rate", "episode_reward_mean", "episode_length_mean"} <= set(results[40])


def test_agents_of_several_runs_are_judged_together_as_each_is_alone(agent: Agent, tmp_path: Path) -> None:
    base = toy_config(training=TrainingConfig(eval_frequency=10))
    evaluation = dataclasses.replace(base.evaluation, robustness=True, num_episodes=3, num_videos=1)
    config = dataclasses.replace(base, evaluation=evaluation)
    agents = {0: agent, 2: toy_agent(toy_config(), seed=1)}
    with EvaluationProtocol(config, NORM_STATS, num_workers=0, num_runs=3) as evaluator:
        assert evaluator.envs.num_envs == 3 * config.env.num_envs
        together = evaluator.evaluate_at_step(agents, 50, {1: tmp_path / "rests", 2: tmp_path / "judged"})
        only_one = evaluator.evaluate_at_step({2: agents[2]}, 50, {})
    with EvaluationProtocol(config, NORM_STATS, num_workers=0) as evaluator:
        alone = {member: evaluator.evaluate_at_step({0: agents[member]}, 50, {0: tmp_path}) for member in agents}
    assert list(together) == [0, 2] and together[0] != together[2]
    for member, metrics in together.items():
        assert metrics == pytest.approx(alone[member][0], rel=1e-3, abs=1e-4)
        assert "robustness/action_noise_0.1" in metrics
    assert only_one == {2: together[2]}  # to the last bit, whoever plays beside it
    record, expected = (json.loads((tmp_path / name / "evaluation.json").read_text()) for name in ("judged/50", "50"))
    assert record["per_episode"] == expected["per_episode"] and record["robustness"] == expected["robustness"]
    assert len(list((tmp_path / "judged" / "50" / "videos").glob("*.mp4"))) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["50", "judged"]


def test_a_record_that_cannot_be_written_costs_a_run_nothing_but_the_record(
    agent: Agent, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = toy_config()
    config = dataclasses.replace(base, evaluation=dataclasses.replace(base.evaluation, num_videos=1))
    place = tmp_path / "evaluations"
    place.write_text("stands in for a disk that takes no more")
    with EvaluationProtocol(config, NORM_STATS, num_workers=0) as evaluator:
        metrics = evaluator.evaluate_at_step({0: agent}, 10, {0: place})[0]
        assert metrics == evaluator.evaluate(evaluator.policy(agent)).metrics()
        with pytest.raises(OSError):  # `evaluate` writes the record that it is asked for, or raises
            evaluator.evaluate(evaluator.policy(agent), directory=place / "10")
    assert "the evaluation could not be recorded" in caplog.text


def test_a_policy_that_only_clones_is_judged_without_its_critics(tmp_path: Path) -> None:
    """The critics were never trained: their values appear nowhere, and they choose nothing."""
    weights = LossWeights(critic_weight=0.0, actor_weight=0.0)
    config = toy_config(
        acrlpd=ACRLPDHyperparams(
            num_action_samples=4, sampling_steps=2, loss_weights=weights, learnable_temperature=False
        )
    )
    agent = toy_agent(config)
    with EvaluationProtocol(config, NORM_STATS, num_workers=0) as evaluator:
        policy = evaluator.policy(agent)
        found = evaluator.evaluate(policy, robustness=True, directory=tmp_path)
    assert policy.best_of_n == 1
    with pytest.raises(ValueError, match=r"best_of_n=4 needs critics to choose by, and this policy has none"):
        create_policy(policy.model, config, NORM_STATS, best_of_n=4)
    assert not {"q_bias", "q_rmse", "best_of_n_value_gain"} & set(found.metrics())
    assert set(found.robustness) == {"obs_noise", "action_noise"}
    record = json.loads((tmp_path / "evaluation.json").read_text())
    assert (record["best_of_n"], record["calibration"], record["traces"]) == (None, None, [])
    out = io.StringIO()
    print_evaluations({"clone": found}, Console(file=out, width=120))
    assert "critic" not in out.getvalue() and "undisturbed" in out.getvalue()


@pytest.mark.parametrize("prompt", ["倉庫" * 200, "... !"])
def test_any_prompt_makes_a_file_name(prompt: str, tmp_path: Path) -> None:
    frames = [np.zeros((16, 24, 3), np.uint8)] * 2
    rollout = dataclasses.replace(make_rollout([0.0], True, q=[1.0]), prompt=prompt, video=frames)
    path = tmp_path / write_film(tmp_path, rollout, 10.0)
    assert path.is_file() and path.name.endswith(f"-{rollout.seed}-success.mp4") and path.name[0] != "-"


def test_lost_episodes_are_counted_apart() -> None:
    with protocol_of("toy-nan-102", num_episodes=6, seed=100) as evaluator:
        summary, played = evaluator.play(seeded_chunks)[0]
    assert (summary.episodes, summary.lost_episodes) == (5, 1)
    assert [rollout.seed for rollout in played] == [100, 101, 103, 104, 105]
    with (
        protocol_of("toy-nan-102", num_episodes=1, seed=102) as evaluator,
        pytest.raises(EnvError, match=r"all 1 episodes .* were lost; the last: .*not finite"),
    ):
        evaluator.play(seeded_chunks)


def test_the_table_says_it_all(evaluator: EvaluationProtocol, agent: Agent) -> None:
    evaluation = evaluator.evaluate(evaluator.policy(agent), robustness=True)
    tasks = {"one": evaluation.summary, "two": evaluation.summary}
    out = io.StringIO()
    print_evaluations({"run 7": dataclasses.replace(evaluation, tasks=tasks)}, Console(file=out, width=120))
    text = out.getvalue()
    rate = f"{100 * evaluation.summary.success_rate:.1f} %"
    for words in ("run 7", rate, "observation noise 0.1", "best of 4", "two", "candidates' mean"):
        assert words in text


def test_the_table_has_the_calibration_of_policies_with_critics(evaluator: EvaluationProtocol, agent: Agent) -> None:
    evaluation = evaluator.evaluate(evaluator.policy(agent))
    assert evaluation.calibration is not None
    known = dataclasses.replace(evaluation.calibration, rank_correlation=0.625, rmse=1.75)
    judged, clone = (dataclasses.replace(evaluation, calibration=calibration) for calibration in (known, None))
    out = io.StringIO()
    print_evaluations({"rl": judged, "bc": clone}, Console(file=out, width=120))
    head, rl, bc, *_ = out.getvalue().splitlines()
    assert head.split()[-4:] == ["Q", "rank", "Q", "rmse"]
    assert (rl.split()[-2:], bc.split()[-2:]) == (["0.62", "1.75"], ["-", "-"])
    assert judged.metrics()["q_rank_correlation"] == judged.to_json()["calibration"]["rank_correlation"] == 0.625
    out = io.StringIO()
    print_evaluations({"bc": clone}, Console(file=out, width=120))
    assert "Q rank" not in out.getvalue()


def test_brackets_in_names_are_no_markup(evaluator: EvaluationProtocol, agent: Agent) -> None:
    evaluation = evaluator.evaluate(evaluator.policy(agent))
    tasks = {"put [/red] away": evaluation.summary, "[bold] move": evaluation.summary}
    named = {"lr[dim] 7": dataclasses.replace(evaluation, tasks=tasks, videos=("[b]/1.mp4",))}
    out = io.StringIO()
    print_evaluations(named, Console(file=out, width=120))
    for words in ("lr[dim] 7: task", "put [/red] away", "[bold] move", "lr[dim] 7: best-of-N", "lr[dim] 7: [b]/1.mp4"):
        assert words in out.getvalue()


def test_what_cannot_work_is_refused() -> None:
    config = toy_config()
    with pytest.raises(EnvError, match=r"there is no environment: set env\.id"):
        EvaluationProtocol(dataclasses.replace(config, env=dataclasses.replace(config.env, id=None)), NORM_STATS)
    eager = dataclasses.replace(config, env=dataclasses.replace(config.env, execution=OpenLoop(9)))
    with pytest.raises(EnvError, match=r"asks the policy every 9 steps, .* has only 4 steps \(model\.action_horizon\)"):
        EvaluationProtocol(eager, NORM_STATS)
    assert create_execution(config) == OpenLoop(3)  # the length of the critics' chunks


def test_an_environment_that_does_not_fit_the_policy_is_refused_before_training() -> None:
    config = toy_config()
    repack = dataclasses.replace(config.data.repack, state=("qpos",))
    other_names = dataclasses.replace(config, data=dataclasses.replace(config.data, repack=repack))
    with pytest.raises(EnvError, match=r"names 'qpos', which .*; it gives observation\.state\. Give it the dataset's"):
        EvaluationProtocol(other_names, NORM_STATS)
    other_arm = dataclasses.replace(config, qchunking=dataclasses.replace(config.qchunking, action_dim=1))
    with pytest.raises(EnvError, match=r"2 action dims, the config's qchunking\.action_dim is 1"):
        EvaluationProtocol(other_arm, NORM_STATS)
