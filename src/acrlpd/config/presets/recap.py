"""RECAP (pi*0.6, arXiv 2511.14759): labels in the prompt, and no critics; on the quick start's task and for aloha.

Everything that is not said here is that of the preset `quickstart_mixed` or `aloha`. As in the paper, V has 201 bins,
30 % of the prompts lose their label, and the policy acts with the positive label and guidance 1. V learns alone for the
first updates, so that the first labels mean something.

    acrlpd train --config quickstart_recap --exp_name recap
    acrlpd recap --config quickstart_recap --exp_name rounds --rounds 2 --episodes 50

What differs from the paper: V and the policy learn in one run, and the advantage looks ahead as far as a chunk: 5 steps
in quickstart_recap and 20 in aloha_recap, where the paper has 50. aloha_recap has the paper's share of positive windows
for data with episodes of the policy, 40 %. quickstart_recap has 15 %, because only a fifth of its demonstrations
succeed: with 30 %, half of the positive windows would be of failures. Its prompts are bytes, so they take 32 tokens.
aloha_recap has no online phase: bring data with successes and failures, and for rounds an environment (`--env.id`).
"""

import dataclasses

from acrlpd.agents.hyperparams import LossWeights
from acrlpd.agents.improvements.recap import RECAP
from acrlpd.config.presets import aloha, quickstart_mixed
from acrlpd.config.train_config import RLTrainConfig


def _recap(
    name: str, base: RLTrainConfig, improvement: RECAP, *, offline_steps: int, warmup_steps: int
) -> RLTrainConfig:
    losses = LossWeights(critic_weight=0.0, actor_weight=1.0, bc_weight=0.0)
    return dataclasses.replace(
        base,
        name=name,
        acrlpd=dataclasses.replace(
            base.acrlpd, loss_weights=losses, policy_data="all", critic_warmup_steps=warmup_steps
        ),
        qchunking=dataclasses.replace(base.qchunking, success_ratio=None),
        improvement=improvement,
        training=dataclasses.replace(base.training, offline_steps=offline_steps, online_steps=0),
        evaluation=dataclasses.replace(base.evaluation, best_of_n=1, baselines=()),
    )


_QUICKSTART = dataclasses.replace(
    quickstart_mixed.CONFIG, model=dataclasses.replace(quickstart_mixed.CONFIG.model, max_token_len=32)
)
CONFIGS = {
    "RECAP on the quick start's task": _recap(
        "quickstart_recap",
        _QUICKSTART,
        RECAP(positive_share=0.15, hidden_dims=(256, 256, 256)),
        offline_steps=1_500,
        warmup_steps=300,
    ),
    "RECAP for ALOHA, frozen backbone; takes 6 hours and 51 GiB of disk on one H100": _recap(
        "aloha_recap", aloha.CONFIG, RECAP(), offline_steps=30_000, warmup_steps=3_000
    ),
}
