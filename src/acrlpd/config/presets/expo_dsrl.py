"""EXPO and DSRL: online RL that needs few steps of the environment, from the quick start and from aloha_sim.

Everything that is not said here is that of the preset `quickstart` or `aloha_sim`, so that numbers can be compared.

EXPO (arXiv 2507.07986) has 10 critics, and a target is the minimum of 2 random ones. There are 16 candidates: 8 chunks
of the policy, and the same chunks with edits of up to 0.2 standard deviations. Each environment step is learned from
more often than in the base preset. What differs from the paper's code: an update trains policy, critics and edit policy
together, there are 20 updates of the critics for one of the others there.

DSRL (arXiv 2506.15799) steers a policy that is trained already and stays as it is. The presets start from the policy
that cloned the successful demonstrations in the run of the base preset, so this run comes first:

    acrlpd train --config quickstart --exp_name quickstart
    acrlpd train --config quickstart_dsrl --exp_name dsrl

--weight_loader.path names another policy. 10 critics agree by their mean, the actor and the noise critics have 3 layers
of 128 units, the noise lies within 2 standard deviations, and the target entropy is 0, as in the paper's code for the
cube transfer of ALOHA. Only one candidate is made for each observation. There is no offline phase of note: the critics
look at the demonstrations for a moment before the policy acts.
"""

import dataclasses

from acrlpd.agents.hyperparams import LossWeights
from acrlpd.agents.improvements.dsrl import DSRL
from acrlpd.agents.improvements.expo import EXPO
from acrlpd.config.presets import aloha_sim, quickstart
from acrlpd.config.run import WeightLoaderConfig
from acrlpd.config.train_config import RLTrainConfig


def _expo(base: RLTrainConfig, *, online_steps: int, update_to_data_ratio: float) -> RLTrainConfig:
    losses = LossWeights(actor_weight=1.0, bc_weight=1.0)
    return dataclasses.replace(
        base,
        name=f"{base.name}_expo",
        critic=dataclasses.replace(base.critic, num_critics=10, q_aggregation="min", target_subset_size=2),
        acrlpd=dataclasses.replace(base.acrlpd, loss_weights=losses, num_action_samples=16),
        improvement=EXPO(edit_scale=0.2),
        training=dataclasses.replace(base.training, online_steps=online_steps),
        online=dataclasses.replace(base.online, update_to_data_ratio=update_to_data_ratio),
    )


def _dsrl(base: RLTrainConfig, *, offline_steps: int, online_steps: int, update_to_data_ratio: float) -> RLTrainConfig:
    losses, updates = LossWeights(actor_weight=1.0, bc_weight=0.0), base.training.offline_steps
    cloned = f"./checkpoints/{base.name}/{base.name}/baselines/bc_success_only/{updates}"
    return dataclasses.replace(
        base,
        name=f"{base.name}_dsrl",
        weight_loader=WeightLoaderConfig("checkpoint", cloned),
        critic=dataclasses.replace(base.critic, num_critics=10, q_aggregation="mean"),
        acrlpd=dataclasses.replace(
            base.acrlpd,
            loss_weights=losses,
            num_action_samples=1,
            critic_gradient_to_policy=False,
            target_entropy=0.0,
            ema_decay=None,
        ),
        improvement=DSRL(noise_bound=2.0, hidden_dims=(128, 128, 128)),
        training=dataclasses.replace(base.training, offline_steps=offline_steps, online_steps=online_steps),
        online=dataclasses.replace(base.online, update_to_data_ratio=update_to_data_ratio),
        evaluation=dataclasses.replace(base.evaluation, best_of_n=None, baselines=()),
    )


_PRESETS = {
    "EXPO on the quick start's task": _expo(quickstart.CONFIG, online_steps=2_400, update_to_data_ratio=0.5),
    "EXPO on aloha_sim": _expo(aloha_sim.CONFIG, online_steps=4_500, update_to_data_ratio=0.16),
    "DSRL on the quick start's task": _dsrl(
        quickstart.CONFIG, offline_steps=600, online_steps=4_800, update_to_data_ratio=1.0
    ),
    "DSRL on aloha_sim": _dsrl(aloha_sim.CONFIG, offline_steps=1_000, online_steps=8_000, update_to_data_ratio=0.4),
}

# Name -> one line about the preset, and the preset.
CONFIGS = {config.name: (line, config) for line, config in _PRESETS.items()}
