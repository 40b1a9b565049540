"""The weights of losses that move during the online phase: cloning counts less, the improvement may count more."""

import numpy as np

from acrlpd.config import RLTrainConfig


def scheduled_weights(rl_config: RLTrainConfig, first_update: int | None, num_updates: int) -> dict[str, np.ndarray]:
    """The weights of the next updates by the names of `Call`: float32 [num_updates] each.

    `first_update` counts the updates of the online phase; None: the updates are offline. The weight of the improvement
    is left out where the config does not move it.
    """
    weights, online = rl_config.acrlpd.loss_weights, rl_config.online
    share = np.zeros(num_updates)  # of the way from the first value to the final value
    if first_update is not None:
        updates = first_update + np.arange(num_updates)
        share = np.minimum(updates / online.bc_weight_decay_steps, 1.0) if online.bc_weight_decay_steps else share + 1.0

    def moved(first: float, final: float | None) -> np.ndarray:
        return (first + share * ((first if final is None else final) - first)).astype(np.float32)

    scheduled = {"bc_weights": moved(weights.bc_weight, online.final_bc_weight)}
    if online.final_actor_weight is not None:
        scheduled["actor_weights"] = moved(weights.actor_weight, online.final_actor_weight)
    return scheduled
