"""EXPO and DSRL: online RL that needs few steps of the environment, in the quick start's task and in aloha_sim.

Everything that is not said here is that of the preset `quickstart_mixed` or `aloha_sim`, so that numbers can be
compared with the run of that preset and its baselines. The demonstrations are not those of `quickstart`, whose cloned
policy makes detours: DSRL cannot do what its policy never does. Targets are values of candidates, as in both papers.

EXPO (arXiv 2507.07986) has 10 critics, and a target is the minimum of 2 random ones. The policy is cloned from windows
that lead to a success, which at least half of each batch is; critics learn from all. There are 16 candidates: 8 chunks
of the policy, and the same chunks with edits of up to 0.2 standard deviations. Such edits change values little, so the
temperature starts at 0.1: at 1, the first thousands of updates would leave the edits random, and at 0.01 the edits
would follow critics that know nothing yet. Each environment step is learned from more often than in the base preset.
quickstart_expo goes online early, from a policy that succeeds in about half of its episodes.
What differs from the paper's code: an update trains policy, critics and edit policy together; there, 20 updates of the
critics are followed by one update of the others.

DSRL (arXiv 2506.15799) steers a policy that is trained already and stays as it is. The presets start from the policy
that cloned the successful demonstrations in the run of the base preset, so this run comes first:

    acrlpd train --config quickstart_mixed --exp_name quickstart_mixed
    acrlpd train --config quickstart_dsrl --exp_name dsrl

--weight_loader.path names another policy. As in the paper's code for the cube transfer of ALOHA, actor and noise
critics have 3 layers of 128 units, and the target entropy is 0. In the offline phase only the critics learn: an actor
that follows critics of a few hundred updates spoils the policy. aloha_sim_dsrl has the paper's noise, one row within 2
standard deviations, its mean of 10 critics, and its one candidate for each observation. In quickstart_dsrl each row has
its own noise within 1.5: with one row for all, the small policy loses most of its successes before the actor has
learned anything. There the critics' minimum chooses among 4 candidates, and a target is the minimum of 2 random
critics, because with the mean DSRL improved nothing (benchmarks/rl_methods-2026-11-20.md). The temperature starts low,
because the run is short.

aloha_sim_dsrl_sac is the same with DSRL-SAC, which the paper's code has for pi0. Critics of noise learn from nothing
but what the policy plays, so there is no offline phase. The online phase starts with more episodes, and the critics
learn alone in its first updates. There is no such preset for the quick start, whose policy needs noise of 160 numbers.
"""

import dataclasses

from acrlpd.agents.backups.best_of_n import BestOfN
from acrlpd.agents.hyperparams import LossWeights
from acrlpd.agents.improvements.dsrl import DSRL
from acrlpd.agents.improvements.dsrl_sac import DSRLSAC
from acrlpd.agents.improvements.expo import EXPO
from acrlpd.config.presets import aloha_sim, quickstart_mixed
from acrlpd.config.run import TrainingConfig, WeightLoaderConfig
from acrlpd.config.train_config import RLTrainConfig


def _expo(name: str, base: RLTrainConfig, training: TrainingConfig, update_to_data_ratio: float) -> RLTrainConfig:
    losses = LossWeights(actor_weight=1.0, bc_weight=1.0)
    return dataclasses.replace(
        base,
        name=name,
        critic=dataclasses.replace(base.critic, num_critics=10, q_aggregation="min", target_subset_size=2),
        acrlpd=dataclasses.replace(
            base.acrlpd, loss_weights=losses, num_action_samples=16, initial_temperature=0.1, policy_data="success"
        ),
        qchunking=dataclasses.replace(base.qchunking, success_ratio=0.5),
        improvement=EXPO(edit_scale=0.2),
        training=training,
        online=dataclasses.replace(base.online, update_to_data_ratio=update_to_data_ratio),
        evaluation=dataclasses.replace(base.evaluation, baselines=()),
    )


def _dsrl(
    name: str,
    base: RLTrainConfig,
    improvement: DSRL,
    *,
    num_action_samples: int,
    target_subset_size: int | None,
    initial_temperature: float,
    offline_steps: int,
    online_steps: int,
    update_to_data_ratio: float,
) -> RLTrainConfig:
    cloned = f"./checkpoints/{base.name}/{base.name}/baselines/bc_success_only/{base.training.offline_steps}"
    return dataclasses.replace(
        base,
        name=name,
        weight_loader=WeightLoaderConfig("checkpoint", cloned),
        critic=dataclasses.replace(base.critic, num_critics=10, target_subset_size=target_subset_size),
        acrlpd=dataclasses.replace(
            base.acrlpd,
            loss_weights=LossWeights(actor_weight=1.0, bc_weight=0.0),
            num_action_samples=num_action_samples,
            policy_data="all",  # nothing is cloned
            critic_gradient_to_policy=False,
            critic_warmup_steps=offline_steps,
            initial_temperature=initial_temperature,
            target_entropy=0.0,
            ema_decay=None,
        ),
        qchunking=dataclasses.replace(base.qchunking, success_ratio=None),
        improvement=improvement,
        training=dataclasses.replace(base.training, offline_steps=offline_steps, online_steps=online_steps),
        online=dataclasses.replace(base.online, update_to_data_ratio=update_to_data_ratio),
        evaluation=dataclasses.replace(base.evaluation, best_of_n=None, baselines=()),
    )


def _dsrl_sac(dsrl: RLTrainConfig, improvement: DSRLSAC, *, start_steps: int) -> RLTrainConfig:
    """DSRL-SAC from a preset of DSRL: the offline updates become a warm-up of the critics in the online phase."""
    warmup, online_steps = dsrl.training.offline_steps, dsrl.training.online_steps
    return dataclasses.replace(
        dsrl,
        name=f"{dsrl.name}_sac",
        acrlpd=dataclasses.replace(dsrl.acrlpd, critic_warmup_steps=0),
        improvement=improvement,
        training=dataclasses.replace(dsrl.training, offline_steps=0, online_steps=warmup + online_steps),
        online=dataclasses.replace(dsrl.online, offline_ratio=0.0, start_steps=start_steps, critic_warmup_steps=warmup),
    )


# Edit policy and noise actor read the policy's tokens, which are computed only if the critics read them.
_QUICKSTART = dataclasses.replace(
    quickstart_mixed.CONFIG,
    critic=dataclasses.replace(quickstart_mixed.CONFIG.critic, use_pi0_features=True, pooling="mean"),
    backup=BestOfN(),
)
_ALOHA_SIM = dataclasses.replace(aloha_sim.CONFIG, backup=BestOfN())
_ALOHA_SIM_DSRL = _dsrl(
    "aloha_sim_dsrl",
    _ALOHA_SIM,
    DSRL(noise_bound=2.0, hidden_dims=(128, 128, 128)),
    num_action_samples=1,
    target_subset_size=None,
    initial_temperature=1.0,
    offline_steps=1_000,
    online_steps=8_000,
    update_to_data_ratio=0.4,
)

CONFIGS = {
    "EXPO on the quick start's task": _expo(
        "quickstart_expo",
        _QUICKSTART,
        dataclasses.replace(
            _QUICKSTART.training, offline_steps=1_200, online_steps=2_400, eval_frequency=1_200, save_frequency=1_200
        ),
        update_to_data_ratio=0.5,
    ),
    "EXPO on aloha_sim": _expo(
        "aloha_sim_expo",
        _ALOHA_SIM,
        dataclasses.replace(_ALOHA_SIM.training, online_steps=4_500),
        update_to_data_ratio=0.16,
    ),
    "DSRL on the quick start's task": _dsrl(
        "quickstart_dsrl",
        _QUICKSTART,
        DSRL(noise_bound=1.5, noise_rows="all", hidden_dims=(128, 128, 128)),
        num_action_samples=4,
        target_subset_size=2,
        initial_temperature=0.1,
        offline_steps=600,
        online_steps=6_600,
        update_to_data_ratio=1.0,
    ),
    "DSRL on aloha_sim": _ALOHA_SIM_DSRL,
    "DSRL-SAC on aloha_sim": _dsrl_sac(
        _ALOHA_SIM_DSRL, DSRLSAC(noise_bound=2.0, hidden_dims=(128, 128, 128)), start_steps=8_000
    ),
}
