"""The methods and domains of the Q-chunking paper: OGBench's manipulation from state, offline and then online.

A preset is named by its method and its domain, for example qc_cube_double; --tasks chooses among the five tasks of the
domain. Chunks have 5 steps. Networks have 4 layers of 512 units and compute in float32. States and actions are given to
the networks as they come. `acrlpd data ogbench` makes the data, in which a success does not end a recording. There are
a million updates offline and a million online, one for each environment step, from one buffer of dataset and replay.

What differs from the paper's code:

- A loss is the mean over the windows that it may learn from, there the mean over all windows. In the play data 0.4 %
  of the windows reach past the end of a recording.
- Past the end of a recording the last action repeats. There the actions of the next one follow, which count in no loss.
- The action in the row of a recording's last state is cloned. There it is left out.
- The target critics follow the critics after an update. There they follow the critics before it.
- Online, the critics also learn from windows in which an episode ends with a success, filled up with the last action.
  They do not learn from the last window of an episode that a time limit ends, because its last state is not recorded.
- Online, whole episodes are played before the updates for their steps. There a step and an update take turns.
- RLPD and RLPD-AC begin with the actions of the untrained policy instead of uniform ones, and their critics have
  LayerNorm after the nonlinearity instead of before it.
- The paper trained cube-quadruple on 100 million steps of data. `acrlpd data ogbench` makes the 5 million of OGBench's
  own dataset unless it is asked for more.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from acrlpd.agents.critics.mlp import MLPCritics
from acrlpd.agents.hyperparams import ACRLPDHyperparams, LossWeights, QChunkingConfig
from acrlpd.agents.improvements.distillation import Distillation
from acrlpd.agents.improvements.sac import SAC
from acrlpd.agents.optimizers.adamw import AdamW
from acrlpd.agents.schedules.constant import ConstantSchedule
from acrlpd.config.data import DataConfig, RepackConfig, RewardConfig
from acrlpd.config.run import EnvConfig, OnlineConfig, TrainingConfig
from acrlpd.config.train_config import RLTrainConfig
from acrlpd.models.families.gaussian import GaussianPolicyConfig
from acrlpd.models.families.state_flow import StateFlowPolicyConfig

_HIDDEN = (512, 512, 512, 512)
# The paper's Adam: no weight decay, and a limit of the gradient norm that is never reached.
_ADAM = AdamW(b2=0.999, weight_decay=0.0, clip_gradient_norm=1e6)


@dataclasses.dataclass(frozen=True)
class Domain:
    """What distinguishes an environment of the paper."""

    state_dim: int
    sparse: bool = False  # whether rewards are -1 until the success, instead of minus the number of unsolved parts
    num_candidates: int = 32  # of QC
    qc_fql_weight: float = 300.0  # how much the one-step policy is held to the flow policy
    fql_weight: float = 300.0


DOMAINS = {
    "cube-double": Domain(37),
    "cube-triple": Domain(46, qc_fql_weight=100.0),
    "cube-quadruple": Domain(55, qc_fql_weight=100.0),
    "scene": Domain(40, sparse=True),
    "puzzle-3x3": Domain(55, sparse=True, num_candidates=64, fql_weight=100.0),
}


def _qc(name: str, domain: Domain) -> RLTrainConfig:
    """QC: the flow policy only clones; the best of N candidates under two critics is what improves it."""
    return RLTrainConfig(
        name="",
        batch_size=256,
        model=StateFlowPolicyConfig(state_dim=domain.state_dim, action_dim=5, action_horizon=5, hidden_dims=_HIDDEN),
        critic=MLPCritics(num_critics=2, hidden_dims=_HIDDEN, q_aggregation="mean"),
        acrlpd=ACRLPDHyperparams(
            loss_weights=LossWeights(actor_weight=0.0, bc_weight=1.0),
            num_action_samples=domain.num_candidates,
            sampling_steps=10,
            action_bounds=(-1.0, 1.0),
            flow_times="uniform",
            discount=0.99,
            target_update_tau=0.005,
            ema_decay=None,
        ),
        qchunking=QChunkingConfig(horizon_length=5, action_dim=5, sequence_ratio=None),
        data=DataConfig(
            asset_id=name.replace("-", "_"),
            repack=RepackConfig(state=("observation.raw_state",)),
            normalize=(),
            validation_share=0.0,  # judged in its environment, on all data as in the paper
            rewards=RewardConfig(
                reward_column="{task}.reward",
                success_column="{task}.success",
                success_ends_episode=False,
                source="success_column" if domain.sparse else "reward_column",
                kind="minus_one_zero",
            ),
        ),
        actor_lr_schedule=ConstantSchedule(3e-4),
        actor_optimizer=_ADAM,
        critic_lr_schedule=ConstantSchedule(3e-4),
        critic_optimizer=_ADAM,
        training=TrainingConfig(
            offline_steps=1_000_000,
            online_steps=1_000_000,
            eval_frequency=100_000,
            log_frequency=5_000,
            save_frequency=100_000,
        ),
        env=EnvConfig(id=f"{name}-play-singletask-{{task}}-v0"),
        online=OnlineConfig(offline_ratio=None, update_to_data_ratio=1.0, start_steps=5_000),
    )


def _bfn(name: str, domain: Domain) -> RLTrainConfig:
    """BFN: single actions, one-step targets, the best of 4 candidates. What QC gains over BFN is due to its chunks."""
    return _with_single_actions(_changed(_qc(name, domain), acrlpd={"num_action_samples": 4}))


def _bfn_n(name: str, domain: Domain) -> RLTrainConfig:
    """BFN-n: BFN with 5-step returns, which are biased where the data is of another policy."""
    return _with_returns_of_5_steps(_bfn(name, domain))


def _qc_fql(name: str, domain: Domain) -> RLTrainConfig:
    """QC-FQL: a one-step policy learns from the flow policy and from the critics, and acts."""
    return _with_one_step_policy(_qc(name, domain), domain.qc_fql_weight)


def _fql(name: str, domain: Domain) -> RLTrainConfig:
    """FQL: QC-FQL with single actions and one-step targets."""
    return _with_single_actions(_with_one_step_policy(_qc(name, domain), domain.fql_weight))


def _fql_n(name: str, domain: Domain) -> RLTrainConfig:
    """FQL-n: FQL with 5-step returns."""
    return _with_returns_of_5_steps(_with_single_actions(_with_one_step_policy(_qc(name, domain), 100.0)))


def _rlpd_ac(name: str, domain: Domain) -> RLTrainConfig:
    """RLPD-AC: SAC over chunks with 10 critics, online from the start; half of each batch comes from the dataset."""
    config = _changed(
        _qc(name, domain),
        critic={"num_critics": 10, "activation": "relu"},
        acrlpd={"num_action_samples": 1, "loss_weights": LossWeights(actor_weight=1.0, bc_weight=0.0)},
        training={"offline_steps": 0},
        online={"offline_ratio": 0.5},
    )
    policy = GaussianPolicyConfig(state_dim=domain.state_dim, action_dim=5, action_horizon=5, hidden_dims=_HIDDEN)
    return dataclasses.replace(config, model=policy, improvement=SAC())


def _rlpd(name: str, domain: Domain) -> RLTrainConfig:
    """RLPD: RLPD-AC with single actions and one-step targets."""
    return _with_single_actions(_rlpd_ac(name, domain))


METHODS = {
    "qc": _qc,
    "qc_fql": _qc_fql,
    "bfn": _bfn,
    "bfn_n": _bfn_n,
    "fql": _fql,
    "fql_n": _fql_n,
    "rlpd": _rlpd,
    "rlpd_ac": _rlpd_ac,
}


def _with_single_actions(config: RLTrainConfig) -> RLTrainConfig:
    return _changed(config, model={"action_horizon": 1}, qchunking={"horizon_length": 1})


def _with_returns_of_5_steps(config: RLTrainConfig) -> RLTrainConfig:
    return _changed(config, qchunking={"horizon_length": 5, "critic_action_horizon": 1})


def _with_one_step_policy(config: RLTrainConfig, distillation_weight: float) -> RLTrainConfig:
    losses = LossWeights(actor_weight=1.0, bc_weight=1.0)
    config = _changed(config, acrlpd={"num_action_samples": 1, "loss_weights": losses})
    improvement = Distillation(distillation_weight=distillation_weight, hidden_dims=_HIDDEN)
    return dataclasses.replace(config, improvement=improvement)


def _changed(config: RLTrainConfig, **sections: Mapping[str, Any]) -> RLTrainConfig:
    """A config with other values in some of its sections."""
    changed = {name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    return dataclasses.replace(config, **changed)


def make_preset(method: str, domain: str) -> RLTrainConfig:
    """The preset of a method and a domain, by the paper's names."""
    return dataclasses.replace(METHODS[method](domain, DOMAINS[domain]), name=f"{method}_{domain.replace('-', '_')}")


def _describe(method: str, domain: str) -> str:
    title = method.upper().replace("_", "-").replace("-N", "-n")
    return f"{title} of the Q-chunking paper on OGBench's {domain} from state"


CONFIGS = {_describe(method, domain): make_preset(method, domain) for method in METHODS for domain in DOMAINS}
