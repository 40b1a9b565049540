"""The methods and domains of the Q-chunking paper: OGBench's manipulation from state, offline and then online.

A preset is named by its method and its domain, for example qc_cube_double; --tasks chooses among the five tasks of the
domain. Chunks have 5 steps. Networks have 4 layers of 512 units and compute in float32. States and actions are given to
the networks as they come. `acrlpd data ogbench` makes the data, in which a success does not end a recording. There are
a million updates offline and a million online, one for each environment step, from one buffer of dataset and replay.

Three things differ from the paper's code. A loss is the mean over the windows that it may learn from, there the mean
over all windows, 0.4 % of which reach past the end of a recording. Past the end of a recording the last action repeats;
there the actions of the next recording follow, which count in no loss. The paper trained cube-quadruple on 100 million
steps of data, and the command makes one million unless it is asked for more.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from acrlpd.agents.critics.mlp import MLPCritics
from acrlpd.agents.hyperparams import ACRLPDHyperparams, LossWeights, QChunkingConfig
from acrlpd.agents.optimizers.adamw import AdamW
from acrlpd.agents.schedules.constant import ConstantSchedule
from acrlpd.config.data import DataConfig, RepackConfig, RewardConfig
from acrlpd.config.run import EnvConfig, OnlineConfig, TrainingConfig
from acrlpd.config.train_config import RLTrainConfig
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


DOMAINS = {
    "cube-double": Domain(37),
    "cube-triple": Domain(46),
    "cube-quadruple": Domain(55),
    "scene": Domain(40, sparse=True),
    "puzzle-3x3": Domain(55, sparse=True, num_candidates=64),
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
            learnable_temperature=False,
            ema_decay=None,
        ),
        qchunking=QChunkingConfig(horizon_length=5, action_dim=5, sequence_ratio=None),
        data=DataConfig(
            asset_id=name.replace("-", "_"),
            repack=RepackConfig(state=("observation.raw_state",)),
            normalize=(),
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
    return _changed(_qc(name, domain), model={"action_horizon": 1}, qchunking={"horizon_length": 1}, **_BEST_OF_4)


def _bfn_n(name: str, domain: Domain) -> RLTrainConfig:
    """BFN-n: BFN with 5-step returns, which are biased where the data is of another policy."""
    chunks = {"horizon_length": 5, "critic_action_horizon": 1}
    return _changed(_qc(name, domain), model={"action_horizon": 1}, qchunking=chunks, **_BEST_OF_4)


_BEST_OF_4 = {"acrlpd": {"num_action_samples": 4}}
METHODS = {"qc": _qc, "bfn": _bfn, "bfn_n": _bfn_n}


def _changed(config: RLTrainConfig, **sections: Mapping[str, Any]) -> RLTrainConfig:
    """A config with other values in some of its sections."""
    changed = {name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    return dataclasses.replace(config, **changed)


def _presets() -> dict[str, tuple[str, RLTrainConfig]]:
    presets = {}
    for method, make in METHODS.items():
        for domain, facts in DOMAINS.items():
            name = f"{method}_{domain.replace('-', '_')}"
            what = f"{method.upper().replace('_', '-')} of the Q-chunking paper on OGBench's {domain} from state"
            presets[name] = what, dataclasses.replace(make(domain, facts), name=name)
    return presets


# Name -> one line about the preset, and the preset.
CONFIGS = _presets()
