"""Updates without a run around them, as a notebook wants them: no phases, no monitoring, no files unless asked.

The updates are those of a run to the last bit: the batches, the random key and the compiled program are those that the
trainer would use at the same step. A saved agent is a run, which `acrlpd train --resume` continues.
"""

import pathlib

import numpy as np

from acrlpd.agents import Agent, Call
from acrlpd.config import ConfigError, RLTrainConfig
from acrlpd.config.create_agent import run_keys
from acrlpd.data.pipeline.dataset import Dataset
from acrlpd.data.pipeline.loader import DataLoader
from acrlpd.runs import directory as runs
from acrlpd.training.checkpoints.metadata import HELD_OUT, check_resume, read_assets
from acrlpd.training.checkpoints.writer import write_checkpoint
from acrlpd.training.evaluation_history import EvaluationHistory
from acrlpd.training.learner import Learner
from acrlpd.training.readiness import skip_online_phase
from acrlpd.training.sharding import create_sharding
from acrlpd.training.trainer import OFFLINE


def update_agent(
    config: RLTrainConfig, agent: Agent, dataset: Dataset, num_updates: int
) -> tuple[Agent, list[dict[str, float]]]:
    """The agent after `num_updates` offline updates on the dataset, and the metrics of each update by name.

    The arrays of the agent that is passed in are used up. Which windows an update sees follows from the seed of the
    config and the step of the agent. Each call prepares the data once, so one call of many updates is faster than many
    calls of one update.
    """
    if num_updates < 1:
        raise ValueError(f"num_updates must be at least 1; found {num_updates}")
    learner = Learner(create_sharding(config))
    learner.add(agent)
    step, rng, rows = int(agent.step), run_keys(config).updates, []
    last_step, warmup = step + num_updates, config.acrlpd.critic_warmup_steps
    loader = DataLoader(dataset, config, device_sharding=learner.sharding.data, first_step=step)
    weights = np.full(loader.capacity, config.acrlpd.loss_weights.bc_weight, np.float32)
    try:
        while step < last_step:
            update_policy = step >= warmup
            stop = last_step if update_policy else min(last_step, warmup)
            count = min(loader.capacity, stop - step)
            calls = [Call(loader.sample_feed(count), weights, rng)]
            if update_policy not in learner.programs or not learner.is_compiled_for(calls):
                learner.compile(calls, {update_policy})
            rows += learner.update(calls, {0}, count, update_policy=update_policy).rows(count)
            step += count
    finally:
        loader.stop()
    return learner.agents[0], rows


def save_agent(
    config: RLTrainConfig, agent: Agent, dataset: Dataset, directory: str | pathlib.Path | None = None
) -> pathlib.Path:
    """Writes the agent as a checkpoint and returns its path, `<directory>/<step>`.

    The checkpoint is one of a run: it can be loaded, evaluated, exported, served and, with the same config, resumed.
    The default directory is that of the run, where `acrlpd train --resume` looks for it. A directory that holds a run
    of another config, or this step or a later step, is refused.
    """
    config, _ = skip_online_phase(config)  # as `acrlpd train` does, which may go on with the run
    place = runs.run_directory(config) if directory is None else pathlib.Path(directory).expanduser().absolute()
    step, assets = int(agent.step), read_assets(config)
    if steps := runs.saved_steps(place):
        check_resume(place / str(steps[-1]), config, assets)
        if step <= steps[-1]:
            raise ConfigError(
                f"{place} has a checkpoint of step {steps[-1]}, and this agent is at step {step}: save to another "
                "directory"
            )
    place.mkdir(parents=True, exist_ok=True)
    with runs.only_trainer(place):
        runs.write_run_config(place, config)
        state, rng = _state(config, dataset, step), run_keys(config).updates
        is_written = write_checkpoint(place, config, agent, step, rng=rng, state=state, assets=assets)
    if not is_written:
        raise OSError(f"the checkpoint {place / str(step)} could not be written; the message before this one says why")
    return place / str(step)


def _state(config: RLTrainConfig, dataset: Dataset, step: int) -> dict[str, object]:
    """What the trainer saves beside the agent, of a run that was not evaluated or monitored so far."""
    return {
        "data": {"seed": config.seed, "step": step, "dataset": dataset.fingerprint},
        HELD_OUT: dataset.held_out_indices,
        "reward_origin": dataset.rewards.origin.name,
        "metrics": {"window": []},
        "monitor": None,
        "evaluation": EvaluationHistory(config.training.early_stopping_patience, config.evaluation.score).state_dict(),
        "phase": OFFLINE,
        "online_start": None,
        "online": None,
        "wall_time_s": 0.0,
    }
