"""Every part of the quick start in a minute: demonstrations, offline RL, an evaluation, online RL, another evaluation.

The preset shows that an installation works from one end to the other. The policy learns next to nothing: it has a few
demonstrations and a few updates.
"""

import dataclasses

from acrlpd.agents.backups.implicit_value import ImplicitValue
from acrlpd.agents.critics.mlp import MLPCritics
from acrlpd.config.data import DemonstrationsConfig
from acrlpd.config.presets import quickstart
from acrlpd.config.run import EvaluationConfig, OnlineConfig, TrainingConfig

_QUICKSTART = quickstart.CONFIG

CONFIG = dataclasses.replace(
    _QUICKSTART,
    name="smoke",
    batch_size=16,
    critic=MLPCritics(num_critics=2, hidden_dims=(64, 64), q_aggregation="mean", use_pi0_features=False),
    backup=ImplicitValue(hidden_dims=(64, 64)),
    data=dataclasses.replace(
        _QUICKSTART.data,
        data_dir="./data/smoke",
        demonstrations=DemonstrationsConfig(num_episodes=12, quality="detours", max_episode_steps=200),
    ),
    training=TrainingConfig(
        offline_steps=60, online_steps=40, eval_frequency=0, log_frequency=10, save_frequency=1_000
    ),
    env=dataclasses.replace(_QUICKSTART.env, num_envs=4, max_episode_steps=50),
    online=OnlineConfig(start_steps=100, update_to_data_ratio=0.125, episodes_per_round=4),
    evaluation=EvaluationConfig(num_episodes=8, best_of_n=4),
)
