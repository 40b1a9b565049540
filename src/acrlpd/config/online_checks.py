"""Checks of what happens in an environment, and of what needs critics to happen."""

from collections.abc import Iterator

from acrlpd.config.train_config import RLTrainConfig
from acrlpd.findings import Finding, Level, error


def check_online(config: RLTrainConfig, level: Level) -> Iterator[Finding]:
    """What an online phase needs; a missing environment is found at `level`."""
    online_steps, actions = config.training.online_steps, config.data.repack.actions
    if online_steps > 0 and config.env.id is None:
        message = (
            f"the {online_steps} online steps need an environment: set env.id, or online_steps 0 to train offline only"
        )
        yield Finding(level, message)
    if online_steps > 0 and len(actions) != 1:
        yield error(
            "an online phase needs actions in one column of the dataset; data.repack.actions names "
            f"{', '.join(actions) or 'no column'}"
        )


def check_baselines(config: RLTrainConfig) -> Iterator[Finding]:
    names, training = config.evaluation.baselines, config.training
    if names and config.env.id is None:
        yield error(f"evaluation.baselines {', '.join(names)} are judged in an environment: set env.id")
    if len(set(names)) < len(names):
        yield error(f"evaluation.baselines names a baseline twice: {', '.join(names)}")
    if "offline_continued" in names and not (training.online_steps and training.offline_steps):
        yield error(
            "the baseline offline_continued trains offline while the run trains online, so it needs both "
            f"training.offline_steps and training.online_steps; found {training.offline_steps} and "
            f"{training.online_steps}. Set both, or remove offline_continued from evaluation.baselines"
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
