"""The evaluation protocol: the same seeds for every policy, success with its uncertainty, and why."""

import dataclasses
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from acrlpd.agents import Agent
from acrlpd.config import RLTrainConfig
from acrlpd.data.pipeline.norm_stats import NormStats
from acrlpd.data.pipeline.rewards import RewardOrigin, environment_rewards
from acrlpd.envs.env import EnvError
from acrlpd.envs.episodes import Rollout, write_video
from acrlpd.envs.pool import EnvPool
from acrlpd.envs.rollouts import ChunkPolicy, rollouts
from acrlpd.evaluation.calibration import BestOfNEffect, Calibration, best_of_n_effect, calibrate
from acrlpd.evaluation.statistics import Summary, summarize
from acrlpd.evaluation.traces import EpisodeTrace, trace_episodes
from acrlpd.policies.agent_policy import AgentPolicy, check_environment, create_agent_policy, policy_cameras

logger = logging.getLogger(__name__)

# Characters of a prompt in the name of a video: file systems take 255 bytes, some alphabets three per character.
_TASK_IN_A_NAME = 60
# Robustness is measured at every such evaluation of a run, where the config asks for it.
_ROBUSTNESS_PERIOD = 5


@dataclasses.dataclass(frozen=True)
class EpisodeRecord:
    """One line of the record."""

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
    traces: tuple[EpisodeTrace, ...] = ()  # of a few episodes

    def to_json(self) -> dict[str, Any]:
        return {
            "env": self.env,
            **self.summary.to_json(),
            "tasks": {task: summary.to_json() for task, summary in self.tasks.items()},
            "best_of_n": self.best_of_n and self.best_of_n.to_json(),
            "calibration": self.calibration and self.calibration.to_json(),
            "robustness": {
                kind: {level: summary.to_json() for level, summary in levels.items()}
                for kind, levels in self.robustness.items()
            },
            "videos": list(self.videos),
            "traces": [trace.to_json() for trace in self.traces],
            "per_episode": [dataclasses.asdict(episode) for episode in self.episodes],
        }

    def metrics(self) -> dict[str, float]:
        """The numbers to follow over a run, by name."""
        summary = self.summary
        metrics = {
            "success_rate": summary.success_rate,
            "success_rate_low": summary.interval[0],
            "success_rate_high": summary.interval[1],
            "episode_reward_mean": summary.mean_return,
            "episode_reward_std": summary.std_return,
            "episode_length_mean": summary.mean_length,
            "episodes": float(summary.episodes),
            "lost_episodes": float(summary.lost_episodes),
        }
        if self.best_of_n is not None:
            metrics |= {"best_of_n_value_gain": self.best_of_n.value_gain}
        if self.calibration is not None:
            metrics |= {"q_bias": self.calibration.bias, "q_rmse": self.calibration.rmse}
        for kind, levels in self.robustness.items():
            metrics |= {f"robustness/{kind}_{level}": s.success_rate for level, s in levels.items()}
        return metrics


@dataclasses.dataclass(frozen=True)
class _Played:
    """All episodes of one evaluation."""

    summary: Summary
    rollouts: list[Rollout]
    robustness: dict[str, dict[str, Summary]]


def evaluate_policy(
    envs: EnvPool,
    policy: ChunkPolicy,
    *,
    num_episodes: int,
    seed: int,
    replan_steps: int,
    num_videos: int = 0,
) -> tuple[Summary, list[Rollout]]:
    """Plays episodes with seeds seed .. seed + num_episodes - 1 to their ends; rollouts by seed."""
    seeds = range(seed, seed + num_episodes)
    episodes = rollouts(envs, policy, seeds, replan_steps=replan_steps, policy_seed=seed, films=num_videos)
    played = sorted(episodes, key=lambda rollout: rollout.seed)
    if not played:
        reason = envs.failures[-1].reason if envs.failures else "nobody knows why"
        raise EnvError(f"all {num_episodes} episodes in {envs.name!r} were lost; the last: {reason}")
    return summarize(played, lost_episodes=num_episodes - len(played)), played


class EvaluationProtocol:
    """Judges the agents of one config in its environment, which is made once and kept.

    The trainer calls `evaluate_at_step`; `evaluate` gives everything at once.
    """

    def __init__(
        self,
        rl_config: RLTrainConfig,
        norm_stats: Mapping[str, NormStats] | None,
        *,
        reward_origin: RewardOrigin | None = None,
        directory: Path | None = None,
        num_workers: int | None = None,
    ) -> None:
        """`reward_origin` says where the rewards of the policy's data came from (`StepRewards.origin`)."""
        if rl_config.env.id is None:
            raise EnvError("an evaluation needs an environment: set env.id, or give --env to `acrlpd eval`")
        self._config = rl_config
        self._norm_stats = norm_stats
        self._rewards = environment_rewards(rl_config.data.rewards, reward_origin)
        self._directory = directory
        self.envs = create_env_pool(rl_config, num_workers=num_workers)
        try:  # now, and not at the first evaluation, which may be hours away
            check_environment(rl_config, norm_stats, self.envs.spec)
        except EnvError:
            self.envs.close()
            raise
        self.replan_steps = replan_steps(rl_config)

    def evaluate_at_step(self, agent: Agent, step: int) -> dict[str, float]:
        """The numbers to log at a step of a run; videos and the full record go to `directory/<step>`.

        Whether robustness is measured depends on the step alone, so that a resumed run does the same.
        """
        period = _ROBUSTNESS_PERIOD * self._config.training.eval_frequency
        robustness = self._config.evaluation.robustness and period > 0 and step % period == 0
        directory = None if self._directory is None else self._directory / str(step)
        played = self._play_all(agent, None, robustness=robustness, films=directory is not None)
        try:
            return self._judge(played, directory).metrics()
        except OSError as error:  # a full disk costs the record, not the run
            logger.error("%s: the evaluation could not be recorded (%s); its numbers count", directory, error)
            return self._judge(played, None).metrics()

    def evaluate(
        self,
        agent: Agent,
        *,
        robustness: bool = False,
        best_of_n: int | None = None,
        directory: Path | None = None,
    ) -> Evaluation:
        """One evaluation; `best_of_n` overrides the config's, `directory` gets evaluation.json and videos."""
        played = self._play_all(agent, best_of_n, robustness=robustness, films=directory is not None)
        return self._judge(played, directory)

    def _play_all(self, agent: Agent, best_of_n: int | None, *, robustness: bool, films: bool) -> _Played:
        config = self._config.evaluation
        wanted = config.best_of_n if best_of_n is None else best_of_n
        policy = self.policy(agent, num_samples=_num_samples(agent, wanted))
        summary, played = self._play(policy, config.num_videos if films else 0)
        if not agent.algorithm.has_critic:  # critics that nobody trained have said something, but they know nothing
            played = [dataclasses.replace(rollout, values={}) for rollout in played]
        return _Played(summary, played, self.evaluate_robustness(policy, summary) if robustness else {})

    def _judge(self, played: _Played, directory: Path | None) -> Evaluation:
        """What the episodes say; all of it goes to `directory`, if there is one."""
        episodes, discount = played.rollouts, self._config.acrlpd.discount
        videos = _write_videos(episodes, directory, self.envs.spec.fps)
        in_directory = {seed: str(path.relative_to(directory)) for seed, path in videos.items() if directory}
        evaluation = Evaluation(
            env=self.envs.name,
            summary=played.summary,
            tasks=_by_task(episodes),
            episodes=tuple(_record(rollout) for rollout in episodes),
            best_of_n=best_of_n_effect(episodes),
            calibration=calibrate(episodes, self._rewards, discount),
            robustness=played.robustness,
            videos=tuple(map(str, videos.values())),
            traces=trace_episodes(episodes, self._rewards, discount, directory=directory, videos=in_directory),
        )
        if directory is not None:
            from acrlpd.evaluation.report import write_json

            write_json(directory / "evaluation.json", evaluation.to_json())
        return evaluation

    def policy(self, agent: Agent, **options: Any) -> AgentPolicy:
        """The agent as a policy for this environment."""
        return create_agent_policy(agent, self._config, self._norm_stats, self.envs.spec, **options)

    def evaluate_robustness(self, policy: AgentPolicy, undisturbed: Summary) -> dict[str, dict[str, Summary]]:
        """The same seeds under noise and, where a critic chooses among them, with other numbers of candidates."""
        config = self._config.evaluation
        own = policy.num_samples or policy.agent.algorithm.acrlpd.num_action_samples
        result: dict[str, dict[str, Summary]] = {}
        result["obs_noise"] = {
            str(level): self._play(dataclasses.replace(policy, observation_noise=level))[0]
            for level in config.noise_levels
        }
        result["action_noise"] = {
            str(level): self._play(dataclasses.replace(policy, action_noise=level))[0] for level in config.noise_levels
        }
        if policy.agent.algorithm.has_critic:
            result["best_of"] = {
                str(n): undisturbed if n == own else self._play(dataclasses.replace(policy, num_samples=n))[0]
                for n in config.best_of_n_values
            }
        return result

    def _play(self, policy: AgentPolicy, num_videos: int = 0) -> tuple[Summary, list[Rollout]]:
        config = self._config.evaluation
        return evaluate_policy(
            self.envs,
            policy,
            num_episodes=config.num_episodes,
            seed=config.seed,
            replan_steps=self.replan_steps,
            num_videos=num_videos,
        )

    def close(self) -> None:
        self.envs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def create_env_pool(rl_config: RLTrainConfig, *, num_workers: int | None = None) -> EnvPool:
    """The environments of a config, with the cameras that its policy looks at."""
    config = rl_config.env
    if config.id is None:
        raise EnvError("there is no environment: set env.id")
    return EnvPool(
        config.id,
        config.num_envs,
        num_workers=num_workers,
        cameras=policy_cameras(rl_config),
        image_size=config.image_size,
        max_episode_steps=config.max_episode_steps,
        timeout_s=config.timeout_s,
    )


def replan_steps(rl_config: RLTrainConfig) -> int:
    """Steps of a chunk that are executed before the policy is asked again."""
    steps = rl_config.env.replan_steps or rl_config.qchunking.horizon_length
    if steps > rl_config.model.action_horizon:
        raise EnvError(f"env.replan_steps {steps} exceeds the policy's action_horizon {rl_config.model.action_horizon}")
    return steps


def _num_samples(agent: Agent, wanted: int | None) -> int | None:
    """Candidates per chunk. An agent that only clones has one: its critics were never trained to choose."""
    if agent.algorithm.has_critic:
        return wanted
    if wanted is not None and wanted > 1:
        raise EnvError(
            f"acrlpd.loss_weights.critic_weight 0 trains no critic that could choose among {wanted} candidates: "
            "leave --best-of-n out, or set it (in a config evaluation.best_of_n) to 1"
        )
    return 1


def _by_task(played: Sequence[Rollout]) -> dict[str, Summary]:
    prompts = sorted({rollout.prompt for rollout in played})
    return {prompt: summarize([r for r in played if r.prompt == prompt]) for prompt in prompts}


def _record(rollout: Rollout) -> EpisodeRecord:
    total = float(rollout.rewards.sum(dtype="float64"))
    return EpisodeRecord(rollout.seed, rollout.prompt, rollout.succeeded, total, rollout.length)


def _write_videos(played: Sequence[Rollout], directory: Path | None, fps: float) -> dict[int, Path]:
    """Paths of the videos by seed."""
    paths = {}
    for rollout in played:
        if directory is None or not rollout.video:
            continue
        outcome = "success" if rollout.succeeded else "failure"
        task = re.sub(r"\W+", "-", rollout.prompt)[:_TASK_IN_A_NAME].strip("-")
        path = directory / "videos" / f"{task or 'episode'}-{rollout.seed}-{outcome}.mp4"
        write_video(path, rollout.video, fps)
        paths[rollout.seed] = path
    return paths
