"""Validation: what a policy and its critics are worth on recorded episodes that no update has seen.

It needs no environment. The policy answers the observations of held-out windows, and its chunks are compared with what
was done there. The critics value the logged chunks, and their values are compared with the returns that followed. The
windows and all random numbers are the same in every validation, so a change of a number is a change of the agent.
"""

import dataclasses
import functools
import json
import logging
import math
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import flax.struct
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from acrlpd.agents import Agent
from acrlpd.agents.best_of_n import take_candidate
from acrlpd.agents.networks import flow_times
from acrlpd.config import RLTrainConfig
from acrlpd.data.pipeline.held_out import HeldOutWindows
from acrlpd.data.pipeline.norm_stats import NormStats
from acrlpd.data.pipeline.norm_stats_checks import near_constant_dims
from acrlpd.evaluation.statistics import Calibration, compare_values, probability_above, rank_correlation
from acrlpd.files import write_text_atomically
from acrlpd.models.observation import Observation
from acrlpd.policies.acting_model import ActingModel, abstract_model, acting_model
from acrlpd.policies.policy import create_policy
from acrlpd.process import compile_fast
from acrlpd.runs.record import VALIDATION_FILE

logger = logging.getLogger(__name__)

# Windows that the policy answers at once; fewer, if the micro-batches of the run are smaller.
_MAX_BATCH = 32
# Windows whose chunks are recorded for the report.
_SHOWN_WINDOWS = 3
# The seed of all noise.
_SEED = 0


@dataclasses.dataclass(frozen=True)
class DimError:
    """Mean absolute errors in one action dim, in the robot's units."""

    sample: float  # of one chunk of the policy
    best_of_n: float | None  # of the chunk that the critics choose; None without critics
    mean_action: float  # of the mean chunk of the training data, which a policy that sees nothing would predict


@dataclasses.dataclass(frozen=True)
class ComparedChunk:
    """One window, action by action in the robot's units; the lists are [steps inside the episode][dims]."""

    episode: int
    step: int
    logged: list[list[float]]
    sample: list[list[float]]
    best_of_n: list[list[float]] | None


@dataclasses.dataclass(frozen=True)
class Validation:
    """What one validation found. What cannot be computed from the held-out episodes, or without critics, is None."""

    episodes: int
    windows: int
    candidates: int  # N of best-of-N
    flow_loss: float | None
    dims: tuple[DimError, ...]  # empty if no window is to be imitated
    # Q at logged chunks against the returns that followed, as far as a terminal was recorded.
    calibration: Calibration | None
    rank_correlation: float | None
    # The probability that Q at a step which leads to a success is above Q at a step of an episode without success.
    success_auc: float | None
    best_of_n_gain: float | None  # mean over windows of the best candidate's value minus the candidates' mean
    chunks: tuple[ComparedChunk, ...]

    def error_ratio(self, kind: str) -> float | None:
        """The error of a `kind` of chunks as a share of that of the mean action, averaged over dims that move.

        A dim that hardly moves is predicted by its mean, and says nothing about what the policy sees.
        """
        still = near_constant_dims(np.array([dim.mean_action for dim in self.dims]))
        moving = [(getattr(dim, kind), dim.mean_action) for i, dim in enumerate(self.dims) if i not in still]
        ratios = [error / mean for error, mean in moving if error is not None]
        return sum(ratios) / len(ratios) if ratios else None

    def metrics(self) -> dict[str, float]:
        """The numbers to follow over a run, by name."""
        numbers = {
            "flow_loss": self.flow_loss,
            "relative_action_error": self.error_ratio("sample"),
            "relative_best_of_n_error": self.error_ratio("best_of_n"),
            "q_rank_correlation": self.rank_correlation,
            "q_rmse": None if self.calibration is None else self.calibration.rmse,
            "q_bias": None if self.calibration is None else self.calibration.bias,
            "success_auc": self.success_auc,
            "best_of_n_gain": self.best_of_n_gain,
        }
        for i, dim in enumerate(self.dims):
            numbers |= {f"action_error/{i}": dim.sample, f"best_of_n_error/{i}": dim.best_of_n}
        return {name: value for name, value in numbers.items() if value is not None}

    def write(self, directory: Path) -> None:
        """Writes validation.json."""
        directory.mkdir(parents=True, exist_ok=True)
        write_text_atomically(directory / VALIDATION_FILE, json.dumps(dataclasses.asdict(self)) + "\n")


@flax.struct.dataclass
class Answers:
    """What a model says to a batch of windows; fields of critics are None without critics."""

    flow_losses: Any  # [b, T] given what the policy acts by: a prompt may have the label of good actions
    sample: Any  # [b, T, a] the first candidate
    best: Any  # [b, T, a] the candidate of the highest value
    logged_values: Any  # [b] of the logged chunks; None also where critics judge noise, which is not logged
    gains: Any  # [b] the highest value of a candidate minus the mean of all


def answer(
    model: ActingModel,
    observation: Observation,
    actions: jax.Array,
    flow_noise: jax.Array,
    times: jax.Array,
    noise: jax.Array,
    *,
    num_steps: int,
) -> Answers:
    """The answers to windows with logged `actions` [b, T, a], for noise [b, T, a] at times [b] and [b, N, T, a]."""
    policy, algorithm = model.policy(), model.algorithm
    observation = policy.preprocess(None, observation, train=False)
    if model.critics is None:
        context = algorithm.acting_context(policy, policy.encode(observation, features=False), observation)
        sample = algorithm.clip(policy.denoise(context, noise[:, :1], num_steps=num_steps))[:, 0]
        return Answers(policy.flow_matching_loss(context, actions, flow_noise, times), sample, None, None, None)
    networks = model.networks()
    context = networks.encode(observation)
    candidates = algorithm.candidates(networks, context, observation, noise, num_steps=num_steps)
    judged, critics = algorithm.judged(networks, context, observation, noise, candidates), networks.critics
    values = critics.online_ensemble.aggregate(critics.online_ensemble(context.features, observation, judged))
    logged_values = None
    if not algorithm.judges_noise:
        logged_values = algorithm.values(networks, context, observation, actions[:, None])[:, 0]
    acting = algorithm.acting_context(policy, context, observation)
    return Answers(
        flow_losses=policy.flow_matching_loss(acting, actions, flow_noise, times),
        sample=candidates[:, 0],
        best=take_candidate(candidates, values.argmax(axis=1)),
        logged_values=logged_values,
        gains=values.max(axis=1) - values.mean(axis=1),
    )


# The programs of this process: runs that differ in their seed, and baselines, have one program.
_programs: dict[Hashable, jax.stages.Compiled] = {}


def _compile(model: ActingModel, batch: Any, everywhere: NamedSharding, num_steps: int) -> jax.stages.Compiled:
    """`answer` for models and batches like these; every process gets the whole result."""
    arrays = [(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves((model, batch))]
    key = (jax.tree.structure((model, batch)), *arrays, everywhere, num_steps)
    if key not in _programs:
        function = jax.jit(functools.partial(answer, num_steps=num_steps), out_shardings=everywhere)
        mesh = everywhere.mesh
        assert isinstance(mesh, Mesh)  # that of the devices
        with jax.set_mesh(mesh):  # models keep their activations split by sample on this mesh
            _programs[key] = function.lower(model, *batch).compile(compiler_options=compile_fast())
    return _programs[key]


class Validator:
    """Judges agents of one config by the same windows."""

    def __init__(
        self,
        rl_config: RLTrainConfig,
        windows: HeldOutWindows,
        norm_stats: Mapping[str, NormStats] | None,
        data_sharding: NamedSharding,
    ) -> None:
        """`data_sharding` is that of a batch. All processes of a run have the same windows and judge together."""
        self._windows, self._sharding, devices = windows, data_sharding, data_sharding.mesh.size
        self._average = rl_config.acts_with_average
        self._policy = create_policy(abstract_model(rl_config), rl_config, norm_stats)  # without arrays
        micro_batch = rl_config.batch_size // rl_config.training.gradient_accumulation_steps
        self._batch_size = math.ceil(min(_MAX_BATCH, micro_batch, len(windows)) / devices) * devices
        rng = np.random.default_rng(_SEED)
        # Times are spread evenly, so the mean over windows has little chance in it.
        times = flow_times((rng.permutation(len(windows)) + 0.5) / len(windows), rl_config.acrlpd)
        flow_noise = rng.standard_normal(windows.actions.shape, np.float32)
        noise = np.stack([self._policy.noise(seed) for seed in range(len(windows))])
        # The arguments of `answer` after the model, on the host.
        self._inputs = (windows.observations, windows.actions, flow_noise, np.asarray(times, np.float32), noise)

    def compile(self, agent: Agent) -> None:
        """Compiles what `judge` needs, so that no process is late when all of them compute together."""
        self._program(self._model(agent), self._batch(0))

    def judge_at_step(self, agent: Agent, step: int, directory: Path | None) -> dict[str, float]:
        """The numbers to log at a step; the full record goes to `directory`/<step>, unless there is no directory."""
        validation = self.judge(agent)
        if directory is not None:
            try:
                validation.write(directory / str(step))
            except OSError as error:  # a full disk costs the record, not the run
                logger.error("%s: the validation could not be recorded (%s); its numbers are logged", directory, error)
        return validation.metrics()

    def judge(self, agent: Agent) -> Validation:
        """What the policy of the agent that acts, and its critics, are worth."""
        answers = self._answer(self._model(agent))
        best = None if answers.best is None else self._to_robot(answers.best)
        sample = self._to_robot(answers.sample)
        return _summarize(self._windows, answers, sample, best, candidates=self._policy.best_of_n)

    def _model(self, agent: Agent) -> ActingModel:
        return acting_model(agent, average=self._average)

    def _answer(self, model: ActingModel) -> Answers:
        """The answers to all windows, on the host."""
        total = len(self._windows)
        answered = []
        for start in range(0, total, self._batch_size):
            batch = self._batch(start)
            answered.append(jax.device_get(self._program(model, batch)(model, *batch)))
        return jax.tree.map(lambda *parts: np.concatenate(parts)[:total], *answered)

    def _program(self, model: ActingModel, batch: Any) -> jax.stages.Compiled:
        everywhere = NamedSharding(self._sharding.mesh, PartitionSpec())
        return _compile(model, batch, everywhere, self._policy.num_steps)

    def _batch(self, start: int) -> Any:
        """The windows from `start` on, on the devices; the last batch is filled up with the last window."""
        rows = np.minimum(np.arange(start, start + self._batch_size), len(self._windows) - 1)

        def place(x: np.ndarray) -> jax.Array:
            part = x[rows]
            return jax.make_array_from_callback(part.shape, self._sharding, lambda index: part[index])

        return jax.tree.map(place, self._inputs)

    def _to_robot(self, actions: np.ndarray) -> np.ndarray:
        state = self._windows.observations.state
        return np.asarray(self._policy.outputs({"state": state, "actions": actions})["actions"])


def _summarize(
    windows: HeldOutWindows, answers: Answers, sample: np.ndarray, best: np.ndarray | None, *, candidates: int
) -> Validation:
    """The numbers of a validation; `sample` and `best` are [n, T, d] in the robot's units."""
    counted = windows.valid & windows.imitated[:, None]

    def error(predicted: np.ndarray) -> np.ndarray:
        return np.abs(predicted - windows.logged)[counted].mean(axis=0, dtype=np.float64)

    dims: tuple[DimError, ...] = ()
    if counted.any():
        of_best = [None] * sample.shape[-1] if best is None else error(best).tolist()
        errors = zip(error(sample).tolist(), of_best, error(windows.mean_action).tolist(), strict=True)
        dims = tuple(DimError(*values) for values in errors)
    values, known = answers.logged_values, np.isfinite(windows.returns)
    calibration = ranks = auc = None
    if values is not None:
        auc = probability_above(values[windows.leads_to_success], values[~windows.episode_succeeds])
        ranks = rank_correlation(values[known], windows.returns[known])
        if known.any():
            calibration = compare_values(values[known].astype(np.float64), windows.returns[known], auc)
    return Validation(
        episodes=windows.num_episodes,
        windows=len(windows),
        candidates=candidates,
        flow_loss=float(answers.flow_losses[counted].mean(dtype=np.float64)) if counted.any() else None,
        dims=dims,
        calibration=calibration,
        rank_correlation=ranks,
        success_auc=auc,
        best_of_n_gain=None if answers.gains is None else float(answers.gains.mean(dtype=np.float64)),
        chunks=_shown_chunks(windows, sample, best),
    )


def _shown_chunks(windows: HeldOutWindows, sample: np.ndarray, best: np.ndarray | None) -> tuple[ComparedChunk, ...]:
    """A few windows at even distances, of those that are to be imitated."""
    rows = np.flatnonzero(windows.imitated)
    places = np.linspace(0, len(rows), _SHOWN_WINDOWS, endpoint=False).astype(np.int64)
    return tuple(
        ComparedChunk(
            episode=int(windows.episode_id[row]),
            step=int(windows.step_id[row]),
            logged=windows.logged[row][windows.valid[row]].tolist(),
            sample=sample[row][windows.valid[row]].tolist(),
            best_of_n=None if best is None else best[row][windows.valid[row]].tolist(),
        )
        for row in (rows[np.unique(places)] if len(rows) else ())
    )
