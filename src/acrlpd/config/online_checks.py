"""Checks of what happens in an environment, and of what needs critics to happen."""

from collections.abc import Iterator
from typing import Literal

from acrlpd.config.train_config import RLTrainConfig
from acrlpd.findings import Finding, at_least, error


def check_online(config: RLTrainConfig, level: Literal["error", "warning"]) -> Iterator[Finding]:
    """The environment and all that happens in it; a missing one is found at `level`."""
    env, online, online_steps = config.env, config.online, config.training.online_steps
    optional = {
        "env__max_episode_steps": env.max_episode_steps,
        "online__episodes_per_round": online.episodes_per_round,
        "online__best_of_n": online.best_of_n,
        "evaluation__best_of_n": config.evaluation.best_of_n,
    }
    yield from at_least(
        1,
        env__num_envs=env.num_envs,
        online__actor_refresh_steps=online.actor_refresh_steps,
        **{name: value for name, value in optional.items() if value is not None},
    )
    yield from at_least(
        0,
        online__start_steps=online.start_steps,
        online__critic_warmup_steps=online.critic_warmup_steps,
        online__bc_weight_decay_steps=online.bc_weight_decay_steps,
        online__final_bc_weight=online.final_bc_weight or 0.0,
        evaluation__num_videos=config.evaluation.num_videos,
    )
    # Of these, a wrong one would show only at the first evaluation that uses it.
    if min(config.evaluation.noise_levels, default=0.0) < 0:
        yield error(f"evaluation.noise_levels must be at least 0; found {list(config.evaluation.noise_levels)}")
    if min(config.evaluation.best_of_n_values, default=1) < 1:
        yield error(f"evaluation.best_of_n_values must be at least 1; found {list(config.evaluation.best_of_n_values)}")
    if min(env.image_size) < 1:
        yield error(f"env.image_size must be height and width in pixels; found {list(env.image_size)}")
    if env.timeout_s <= 0:
        yield error(f"env.timeout_s must be above 0; found {env.timeout_s}")
    if not 0.0 <= online.offline_ratio <= 1.0:
        yield error(f"online.offline_ratio must lie in [0, 1]; found {online.offline_ratio}")
    if online.update_to_data_ratio <= 0:
        yield error(f"online.update_to_data_ratio must be above 0; found {online.update_to_data_ratio}")
    if online_steps > 0 and env.id is None:
        yield Finding(
            level,
            f"the {online_steps} online steps need an environment: set env.id, or online_steps 0 to train offline only",
        )
    if online_steps > 0 and len(config.data.repack.actions) != 1:
        yield error(
            "an online phase needs actions in one column of the dataset; data.repack.actions names "
            f"{', '.join(config.data.repack.actions) or 'none'}"
        )


def check_baselines(config: RLTrainConfig) -> Iterator[Finding]:
    names, training = config.evaluation.baselines, config.training
    if names and config.env.id is None:
        yield error(f"evaluation.baselines {', '.join(names)} are judged in an environment: set env.id")
    if len(set(names)) < len(names):
        yield error(f"evaluation.baselines names one twice: {', '.join(names)}")
    if "offline_continued" in names and not (training.online_steps and training.offline_steps):
        yield error(
            "evaluation.baselines offline_continued goes on offline where the run goes online: it needs both "
            f"training.offline_steps and training.online_steps; found {training.offline_steps} and "
            f"{training.online_steps}. Set them, or leave it out of evaluation.baselines"
        )


def check_cloning(config: RLTrainConfig) -> Iterator[Finding]:
    """Without a critic there is nobody to ask for a value."""
    hp, evaluation = config.acrlpd, config.evaluation
    if hp.loss_weights.critic_weight != 0:
        return
    without = "acrlpd.loss_weights.critic_weight 0 trains no critic"
    if config.training.online_steps > 0:
        yield error(f"{without}, and cloning one's own episodes improves nothing: set training.online_steps 0")
    samples = hp.num_action_samples if evaluation.best_of_n is None else evaluation.best_of_n
    if config.env.id is not None and samples > 1:
        yield error(f"{without} that could choose among {samples} candidates: set evaluation.best_of_n 1")
    if evaluation.robustness and max(evaluation.best_of_n_values, default=1) > 1:
        yield error(f"{without} that could choose among candidates: set evaluation.best_of_n_values 1")
