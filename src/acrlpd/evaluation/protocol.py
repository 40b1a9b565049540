"""The evaluation protocol: the same seeds for every policy, success with its uncertainty, and what explains it."""

import contextlib
import dataclasses
import json
import logging
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from acrlpd.agents import Agent
from acrlpd.config import RLTrainConfig
from acrlpd.data.pipeline.norm_stats import NormStats
from acrlpd.data.pipeline.rewards import RewardOrigin, environment_rewards
from acrlpd.envs import EnvError, EnvPool, Plan, Rollout, joint_rollouts
from acrlpd.envs.create import check_environment, create_env_pool, create_execution
from acrlpd.envs.episodes import write_video
from acrlpd.evaluation.statistics import BestOfNEffect, Calibration, Summary, best_of_n_effect, calibrate, summarize
from acrlpd.evaluation.traces import EpisodeTrace, add_film, trace_episodes
from acrlpd.execution.base import ChunkPolicy
from acrlpd.files import write_text_atomically
from acrlpd.policies.acting_model import ActingModel, acting_model
from acrlpd.policies.policy import Policy, create_policy
from acrlpd.runs.record import EVALUATION_FILE

logger = logging.getLogger(__name__)

# Characters of a prompt in the name of a video: a name has at most 255 bytes, and some alphabets need 3 per character.
_TASK_IN_A_NAME = 60
# Where the config asks for robustness, a run measures it at multiples of this many evaluation periods.
_ROBUSTNESS_PERIOD = 5
# Seconds between two lines about the progress of an evaluation.
_PROGRESS_PERIOD_S = 10.0


@dataclasses.dataclass(frozen=True)
class EpisodeRecord:
    """One episode in the record of an evaluation."""

    seed: int
    task: str
    success: bool
    total_reward: float
    length: int


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What one evaluation found."""

    env: str
    summary: Summary
    tasks: dict[str, Summary]  # by prompt
    episodes: tuple[EpisodeRecord, ...]
    best_of_n: BestOfNEffect | None = None
    calibration: Calibration | None = None
    # Kind of disturbance -> its level -> how the policy did.
    robustness: dict[str, dict[str, Summary]] = dataclasses.field(default_factory=dict)
    videos: tuple[str, ...] = ()
    traces: tuple[EpisodeTrace, ...] = ()  # a few episodes in detail

    def to_json(self) -> dict[str, Any]:
        """The record of the evaluation as plain JSON; the numbers of the summary stand at the top."""
        content = dataclasses.asdict(self)
        content["per_episode"] = content.pop("episodes")
        return json.loads(json.dumps(content.pop("summary") | content))

    def metrics(self) -> dict[str, float]:
        """The numbers to follow over a run, by name."""
        summary = self.summary
        metrics = {
            "success_rate": summary.success_rate,
            "success_rate_low": summary.interval[0],
            "success_rate_high": summary.interval[1],
            "episode_reward_mean": summary.mean_return,
            "episode_reward_std": summary.std_return,
            "episode_reward_min": summary.min_return,
            "episode_reward_max": summary.max_return,
            "episode_length_mean": summary.mean_length,
            "episodes": float(summary.episodes),
            "lost_episodes": float(summary.lost_episodes),
        }
        if self.best_of_n is not None:
            metrics |= {"best_of_n_value_gain": self.best_of_n.value_gain}
        if self.calibration is not None:
            metrics |= {"q_bias": self.calibration.bias, "q_rmse": self.calibration.rmse}
            if self.calibration.rank_correlation is not None:
                metrics |= {"q_rank_correlation": self.calibration.rank_correlation}
        for kind, levels in self.robustness.items():
            metrics |= {f"robustness/{kind}_{level}": s.success_rate for level, s in levels.items()}
        return metrics


class EvaluationProtocol:
    """Judges policies in the environment of one config, which is made once and kept.

    The trainer calls `evaluate_at_step`; `evaluate` gives everything at once. With `num_runs` the protocol judges that
    many runs of the config together: each run, a member, plays the same episodes in its own env.num_envs environments.
    """

    def __init__(
        self,
        rl_config: RLTrainConfig,
        norm_stats: Mapping[str, NormStats] | None,
        *,
        reward_origin: RewardOrigin | None = None,
        num_workers: int | None = None,
        num_runs: int = 1,
        envs: EnvPool | None = None,
    ) -> None:
        """`reward_origin` says where the rewards of the policy's data came from (`StepRewards.origin`).

        `envs` are environments for this config and `num_runs` that the caller made and closes.
        """
        self._config = rl_config
        self._norm_stats = norm_stats
        self._rewards = environment_rewards(rl_config.data.rewards, reward_origin)
        self._num_runs = num_runs
        self._execution = create_execution(rl_config)
        with contextlib.ExitStack() as stack:
            if envs is None:
                envs = stack.enter_context(create_env_pool(rl_config, num_workers=num_workers, num_runs=num_runs))
            # Checked now instead of at the first evaluation, which may be hours away.
            check_environment(rl_config, norm_stats, envs.spec)
            self.envs, self._stack = envs, stack.pop_all()

    def policy(self, agent: Agent) -> Policy:
        """An agent as a policy that takes the best candidate."""
        return create_policy(self._model(agent), self._config, self._norm_stats)

    def evaluate_at_step(
        self, agents: Mapping[int, Agent], step: int, directories: Mapping[int, Path]
    ) -> dict[int, dict[str, float]]:
        """The numbers to log at a step, by member; the agents of all members act together.

        A member without an agent rests. Videos and the full record of a member go to `directories[member]/<step>`; a
        member without a directory has no record. Whether robustness is measured depends on the step alone, so that a
        resumed run does the same.
        """
        period = _ROBUSTNESS_PERIOD * self._config.training.eval_frequency
        robustness = self._config.evaluation.robustness and period > 0 and step % period == 0
        models = {member: self._model(agent) for member, agent in agents.items()}
        policy = self.policy(next(iter(agents.values()))).with_models(models, self._num_runs)
        written = {member: directories[member] / str(step) for member in agents if member in directories}
        judged = self._judge(policy, list(agents), robustness=robustness, films=bool(written))
        for member, directory in written.items():
            try:
                self._record(*judged[member], directory)
            except OSError as error:  # a full disk costs the record, not the run
                logger.error("%s: the evaluation could not be recorded (%s); its numbers are logged", directory, error)
        return {member: evaluation.metrics() for member, (evaluation, _) in judged.items()}

    def evaluate(self, policy: Policy, *, robustness: bool = False, directory: Path | None = None) -> Evaluation:
        """One evaluation of any policy; evaluation.json and videos go to `directory`."""
        [(evaluation, played)] = self._judge(policy, [0], robustness=robustness, films=directory is not None).values()
        return evaluation if directory is None else self._record(evaluation, played, directory)

    def play(
        self, policy: ChunkPolicy, members: Sequence[int] = (0,), *, films: int = 0
    ) -> dict[int, tuple[Summary, list[Rollout]]]:
        """Plays the config's episodes to their ends; for each member the rollouts in order of seeds."""
        config = self._config.evaluation
        seeds = range(config.seed, config.seed + config.num_episodes)
        plans = [Plan(seeds, config.seed) if member in members else None for member in range(self._num_runs)]
        played: dict[int, list[Rollout]] = {member: [] for member in members}
        told = time.monotonic()
        for member, rollout in joint_rollouts(self.envs, policy, plans, execution=self._execution, films=films):
            played[member].append(rollout)
            if time.monotonic() - told >= _PROGRESS_PERIOD_S:
                told = time.monotonic()
                logger.info("%s", _describe_progress(self.envs.name, list(played.values()), len(seeds)))
        return {member: self._summarize(episodes, seeds) for member, episodes in played.items()}

    def evaluate_robustness(
        self, policy: Policy, undisturbed: Mapping[int, Summary]
    ) -> dict[int, dict[str, dict[str, Summary]]]:
        """The same seeds under noise and, where critics choose among candidates, with other numbers of candidates.

        `undisturbed` and the result are by member.
        """
        config = self._config.evaluation

        def play(**changes: Any) -> Mapping[int, Summary]:
            played = self.play(dataclasses.replace(policy, **changes), list(undisturbed))
            return {member: summary for member, (summary, _) in played.items()}

        found = {
            "obs_noise": {str(level): play(observation_noise=level) for level in config.noise_levels},
            "action_noise": {str(level): play(action_noise=level) for level in config.noise_levels},
        }
        if policy.model.critics is not None:
            found["best_of"] = {
                str(n): undisturbed if n == policy.best_of_n else play(best_of_n=n) for n in config.best_of_n_values
            }
        return {
            member: {
                kind: {level: summaries[member] for level, summaries in levels.items()}
                for kind, levels in found.items()
            }
            for member in undisturbed
        }

    def _model(self, agent: Agent) -> ActingModel:
        return acting_model(agent, average=self._config.acts_with_average)

    def _summarize(self, episodes: Sequence[Rollout], seeds: Sequence[int]) -> tuple[Summary, list[Rollout]]:
        """How the episodes of a member went, and the episodes in order of seeds."""
        if not episodes:
            reason = self.envs.failures[-1].reason if self.envs.failures else "the reason is not known"
            raise EnvError(f"all {len(seeds)} episodes in {self.envs.name!r} were lost; the last: {reason}")
        ordered = sorted(episodes, key=lambda rollout: rollout.seed)
        return summarize(ordered, lost_episodes=len(seeds) - len(ordered)), ordered

    def _judge(
        self, policy: Policy, members: Sequence[int], *, robustness: bool, films: bool
    ) -> dict[int, tuple[Evaluation, list[Rollout]]]:
        """Plays all episodes; for each member what they show, and the episodes without those of robustness."""
        played = self.play(policy, members, films=self._config.evaluation.num_videos if films else 0)
        undisturbed = {member: summary for member, (summary, _) in played.items()}
        disturbed = self.evaluate_robustness(policy, undisturbed) if robustness else {}
        return {
            member: (self._explain(summary, episodes, disturbed.get(member, {})), episodes)
            for member, (summary, episodes) in played.items()
        }

    def _explain(
        self, summary: Summary, played: list[Rollout], robustness: dict[str, dict[str, Summary]]
    ) -> Evaluation:
        """The episodes of one member with everything that explains their summary."""
        prompts, discount = sorted({rollout.prompt for rollout in played}), self._config.acrlpd.discount
        return Evaluation(
            env=self.envs.name,
            summary=summary,
            tasks={prompt: summarize([r for r in played if r.prompt == prompt]) for prompt in prompts},
            episodes=tuple(
                EpisodeRecord(r.seed, r.prompt, r.succeeded, float(r.rewards.sum(dtype="float64")), r.length)
                for r in played
            ),
            best_of_n=best_of_n_effect(played),
            calibration=calibrate(played, self._rewards, discount),
            robustness=robustness,
            traces=trace_episodes(played, self._rewards, discount),
        )

    def _record(self, evaluation: Evaluation, played: Sequence[Rollout], directory: Path) -> Evaluation:
        """Writes videos, film strips and evaluation.json; returns the evaluation with the paths of the films."""
        films = {rollout.seed: rollout for rollout in played if rollout.video}
        videos = {seed: write_film(directory, rollout, self.envs.spec.fps) for seed, rollout in films.items()}
        traces = [
            add_film(trace, directory, films[trace.seed].video, videos[trace.seed]) if trace.seed in films else trace
            for trace in evaluation.traces
        ]
        paths = tuple(str(directory / video) for video in videos.values())
        evaluation = dataclasses.replace(evaluation, videos=paths, traces=tuple(traces))
        write_evaluations(directory, evaluation.to_json())
        return evaluation

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()


def _describe_progress(env: str, played: Sequence[Sequence[Rollout]], num_seeds: int) -> str:
    """How far the episodes of all members are, in one line."""
    over = [rollout for episodes in played for rollout in episodes]
    successes = sum(rollout.succeeded for rollout in over)
    return f"{env}: {len(over)} of {num_seeds * len(played)} episodes, {successes} of them successes"


def write_evaluations(directory: Path, content: Mapping[str, Any]) -> None:
    """Writes evaluation.json; a kill leaves either the old file or the new one."""
    directory.mkdir(parents=True, exist_ok=True)
    write_text_atomically(directory / EVALUATION_FILE, json.dumps(content, indent=2) + "\n")


def write_film(directory: Path, rollout: Rollout, fps: float) -> str:
    """Writes the video of an episode; returns its path in `directory`, which names the task and the outcome."""
    outcome = "success" if rollout.succeeded else "failure"
    task = re.sub(r"\W+", "-", rollout.prompt)[:_TASK_IN_A_NAME].strip("-")
    video = f"videos/{task or 'episode'}-{rollout.seed}-{outcome}.mp4"
    write_video(directory / video, rollout.video, fps)
    return video
