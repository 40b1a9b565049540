"""RECAP (pi*0.6, arXiv 2511.14759) on the quick start's task: labels in the prompt, and no critics.

Everything that is not said here is that of the preset `quickstart`. As in the paper, V has 201 bins, 30 % of the
prompts lose their label, and the policy acts with the positive label and guidance 1. V learns alone for the first
updates, so that the first labels mean something.

What differs from the paper: 15 % of the windows are positive, where the paper has 30 % for demonstrations, because only
a fifth of the demonstrations here succeed; the advantage looks ahead 5 steps, the length of a chunk here, where the
paper has 50; V and the policy learn in one run; prompts are bytes, so they take 32 tokens.

    acrlpd train --config quickstart_recap --exp_name recap
    acrlpd recap --config quickstart_recap --exp_name rounds --rounds 2 --episodes 50
"""

import dataclasses

from acrlpd.agents.hyperparams import LossWeights
from acrlpd.agents.improvements.recap import RECAP
from acrlpd.config.presets import quickstart
from acrlpd.config.train_config import RLTrainConfig

_WARMUP_STEPS = 300


def _recap(base: RLTrainConfig) -> RLTrainConfig:
    return dataclasses.replace(
        base,
        name=f"{base.name}_recap",
        model=dataclasses.replace(base.model, max_token_len=32),
        acrlpd=dataclasses.replace(
            base.acrlpd,
            loss_weights=LossWeights(critic_weight=0.0, actor_weight=1.0, bc_weight=0.0),
            critic_warmup_steps=_WARMUP_STEPS,
        ),
        improvement=RECAP(positive_share=0.15, hidden_dims=(256, 256, 256)),
        training=dataclasses.replace(
            base.training, offline_steps=base.training.offline_steps + _WARMUP_STEPS, online_steps=0
        ),
        evaluation=dataclasses.replace(base.evaluation, best_of_n=1, baselines=()),
    )


# Name -> one line about the preset, and the preset.
CONFIGS = {"quickstart_recap": ("RECAP on the quick start's task", _recap(quickstart.CONFIG))}
